"""Loads from stores into the host pool: one for each object, however many want it, from the nearest that gives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from treadle.runtime.state.tiers.host import Entry, HostPool
from treadle.runtime.state.tiers.lane import Buffers, Lane, Work
from treadle.runtime.state.tiers.ticket import Object

BATCH_BYTES = 8 << 20
"""About as much is asked of a store in one call: the first objects arrive early, and threads share the rest."""
BATCHES = 16
"""At least as many fit into the room for loads: a call that hangs keeps its part of it."""

Arrived = Callable[[Entry | None], None]
"""Told the entry, which stays only as long as the call lasts if it is not held; None: no store gave it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A store to load from."""

    lane: Lane
    limit_s: float
    holds: Callable[[bytes], bool | None]
    """whether it has an object; None: not known"""
    lacks: Callable[[Sequence[bytes]], None]
    """told what it did not give"""


@dataclass(eq=False, slots=True)
class Load:
    """An object on its way from a store."""

    key: bytes
    num_bytes: int
    queued: float
    sources: deque[Source]
    """those still to be asked"""
    arrived: list[Arrived] = field(default_factory=list)
    entry: Entry | None = None


class Loads:
    """The loads under way and waiting, within ``limit_bytes`` of the pool."""

    def __init__(
        self, pool: HostPool, sources: Sequence[Source], clock: Callable[[], float], *, limit_bytes: int
    ) -> None:
        self._pool, self._sources, self._clock = pool, sources, clock
        self._limit = limit_bytes
        self._batch_bytes = min(BATCH_BYTES, limit_bytes // BATCHES)
        self._loads: dict[bytes, Load] = {}
        self._waiting: deque[Load] = deque()
        self._arrived = 0.0
        """when a store last gave something"""
        self.num_bytes = 0
        """of loads under way"""

    @property
    def busy(self) -> bool:
        """Whether anything is under way or waits."""
        return bool(self._loads)

    def want(self, each: Object, arrived: Arrived) -> None:
        """Have ``arrived`` called once, at once if no store may have the object; ``start`` begins the load."""
        load = self._loads.get(each.key)
        if load is not None and load.num_bytes == each.num_bytes:
            load.arrived.append(arrived)
            return
        # A store that was not heard of yet is asked after all that are known to have it.
        answers = [(source.holds(each.key), source) for source in self._sources]
        sources = deque(source for wanted in (True, None) for holds, source in answers if holds is wanted)
        if load is not None or not sources:
            arrived(None)
            return
        load = Load(each.key, each.num_bytes, self._clock(), sources, [arrived])
        self._loads[each.key] = load
        self._waiting.append(load)

    def start(self) -> None:
        """Begin the loads that there is room for; what came into the pool by another way is there already."""
        ready, kept = list[Load](), list[Load]()
        while self._waiting:
            load = self._waiting.popleft()
            if (entry := self._pool.acquire(load.key, load.num_bytes)) is not None:
                load.entry = entry
                self._finish(load, ok=True)
                self._pool.release(entry)
                continue
            if load.key in self._pool:
                # Of another length, which no store's would replace.
                self._finish(load, ok=False)
            elif self._pool.is_placed(load.key):
                # On its way down itself, which lets others pass.
                kept.append(load)
            elif not self._choose_source(load):
                self._finish(load, ok=False)
            elif self._reserve(load):
                ready.append(load)
            else:
                kept.append(load)
                break
        self._waiting.extendleft(reversed(kept))
        self._ask(ready)

    def _choose_source(self, load: Load) -> bool:
        """Leave out stores that would not be asked; return False if none is left, or if none has given anything for as
        long as the next one may take."""
        while load.sources and load.sources[0].lane.refuses("load"):
            load.sources.popleft().lane.stats["load"].held_off += 1
        return bool(load.sources) and self._clock() - max(load.queued, self._arrived) < load.sources[0].limit_s

    def _reserve(self, load: Load) -> bool:
        if self.num_bytes and self.num_bytes + load.num_bytes > self._limit:
            return False
        load.entry = self._pool.reserve(load.key, load.num_bytes)
        if load.entry is not None:
            self.num_bytes += load.num_bytes
        return load.entry is not None

    def _ask(self, loads: list[Load]) -> None:
        """Hand loads to the next store of each, in batches."""
        batches: dict[str, list[Load]] = {}
        for load in loads:
            if not load.sources:
                self._finish(load, ok=False)
                self._let_go(load)
                continue
            batch = batches.setdefault(load.sources[0].lane.name, [])
            batch.append(load)
            if sum(each.num_bytes for each in batch) >= self._batch_bytes:
                self._hand(batches.pop(load.sources[0].lane.name))
        for batch in batches.values():
            self._hand(batch)

    def _hand(self, batch: list[Load]) -> None:
        source = batch[0].sources[0]
        for load in batch:
            load.sources.popleft()
        taken = source.lane.submit(
            "load",
            [load.key for load in batch],
            partial(self._settle, source, batch),
            limit_s=source.limit_s,
            prepare=partial(self._prepare, batch),
            release=partial(self._release, batch),
        )
        if not taken:
            self._ask(batch)

    def _prepare(self, batch: list[Load]) -> Buffers:
        """Return where the objects go; runs on a thread of the lane."""
        entries = [load.entry for load in batch if load.entry is not None]
        return [entry.key for entry in entries], [self._pool.room(entry) for entry in entries]

    def _settle(self, source: Source, batch: list[Load], work: Work) -> None:
        """Take the good outcomes; what a store did not answer in time goes on in another place: it may still write."""
        if not work.late:
            source.lacks([key for key, ok in work.outcome.items() if not ok])
        if any(work.outcome.values()):
            self._arrived = self._clock()
        for load in batch:
            if work.outcome[load.key]:
                assert load.entry is not None
                self._pool.commit(load.entry, sealed=True)
                self._finish(load, ok=True)
            elif work.late:
                assert load.entry is not None
                self._pool.forget(load.entry)
                if load.sources:
                    # By ``start``, if there is room beside the place that stays out of use.
                    again = Load(load.key, load.num_bytes, self._clock(), load.sources, load.arrived)
                    self._loads[load.key] = again
                    self._waiting.append(again)
                else:
                    self._finish(load, ok=False)

    def _release(self, batch: list[Load], work: Work) -> None:
        """Go on with what was not there, now that the store is done with the pool."""
        again = [load for load in batch if not work.late and not work.outcome[load.key]]
        for load in batch:
            if load not in again:
                self._let_go(load)
        self._ask(again)

    def _finish(self, load: Load, *, ok: bool) -> None:
        """Tell all who want an object."""
        del self._loads[load.key]
        for arrived in load.arrived:
            arrived(load.entry if ok else None)

    def _let_go(self, load: Load) -> None:
        assert load.entry is not None
        self.num_bytes -= load.num_bytes
        self._pool.release(load.entry)
