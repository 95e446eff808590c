"""Saves from the host pool to stores: each object to every store that takes objects and is not known to have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from treadle.runtime.state.tiers.host import Entry, HostPool
from treadle.runtime.state.tiers.lane import Buffers, Lane, Work

BATCH_BYTES = 16 << 20
"""About as much goes to a store in one call."""
BATCHES = 32
"""At least as many fit into the pool: a call that hangs keeps its part of it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A store to save to."""

    lane: Lane
    limit_s: float
    holds: Callable[[bytes], bool | None]
    """whether it has an object; None: not known"""
    note: Callable[[Sequence[bytes]], None]
    """told what it has taken"""


class Saves:
    """Hands objects over. What waits for a store is not held: what the pool evicts before its turn is not saved."""

    def __init__(self, pool: HostPool, targets: Sequence[Target]) -> None:
        self._pool = pool
        self._batch_bytes = min(BATCH_BYTES, pool.capacity // BATCHES)
        self._targets = [target for target in targets if target.lane.store.saves]

    def save(self, entries: Sequence[Entry]) -> None:
        """Queue objects of the pool for every store."""
        for target in self._targets:
            new = [entry for entry in entries if not target.holds(entry.key)]
            for batch in _batches(new, self._batch_bytes):
                held: list[Entry] = []
                target.lane.submit(
                    "save",
                    batch,
                    partial(_note, target),
                    limit_s=target.limit_s,
                    prepare=partial(self._prepare, batch, held),
                    release=partial(self._release, held),
                )

    def _prepare(self, keys: Sequence[bytes], held: list[Entry]) -> Buffers:
        """Hold and seal what is still in the pool; runs on a thread of the lane."""
        held += [entry for key in keys if (entry := self._pool.acquire(key)) is not None]
        return [entry.key for entry in held], [self._pool.sealed(entry) for entry in held]

    def _release(self, held: list[Entry], _work: Work) -> None:
        for entry in held:
            self._pool.release(entry)


def _note(target: Target, work: Work) -> None:
    target.note([key for key, ok in work.outcome.items() if ok])


def _batches(entries: Sequence[Entry], batch_bytes: int) -> Iterator[list[bytes]]:
    """Yield the keys in parts of about ``batch_bytes``."""
    batch, size = list[bytes](), 0
    for entry in entries:
        batch.append(entry.key)
        size += entry.num_bytes
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
