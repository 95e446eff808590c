"""An engine's arena with tiers below it, and a store that can be told to misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.state.tiers.store import Scope
from treadle.runtime.state.tiers.ticket import Object, Ticket, Where
from treadle.runtime.state.tiers.tiers import Link, Tiers

UNITS = 4
SIZE = 256 * UNITS
ITEM = SIZE + 256
ARENA = 64


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def page(n: int, at: int | None = None) -> Object:
    return Object(key(n), "page", (n if at is None else at) * UNITS, SIZE)


class Engine:
    """An arena of 64 pages, page n full of n, and tiers below it."""

    close_s = 5.0

    def __init__(
        self, *links: Link, host: int = 16, model: str = "m", backend: Backend | None = None, **settings: object
    ) -> None:
        backend = backend or CpuBackend(threads=1)
        self.arena = torch.arange(ARENA, dtype=torch.uint8).repeat_interleave(SIZE).to(backend.device)
        self.stream = backend.stream(overlap=True)
        self.tiers = Tiers(
            backend, self.arena, self.stream, host_bytes=host * ITEM, sizes=[SIZE], model=model, layout="l",
            links=links, **settings,  # type: ignore[arg-type]
        )  # fmt: skip

    def finish(self, ticket: Ticket, limit_s: float = 20.0) -> list[bool]:
        until(lambda: ticket.done, self.tiers, limit_s)
        return ticket.ok

    def sink(self, *numbers: int) -> list[bool]:
        return self.finish(self.tiers.sink([page(n) for n in numbers]))

    def fetch(self, *numbers: int, at: int = 40) -> list[bool]:
        """Fetch pages to places from ``at`` on; those that arrive must hold their number, others are as before."""
        self.arena[at * SIZE : (at + len(numbers)) * SIZE] = 255
        ok = self.finish(self.tiers.fetch([page(n, at + i) for i, n in enumerate(numbers)]))
        for i, n in enumerate(numbers):
            assert set(self.arena[(at + i) * SIZE : (at + i + 1) * SIZE].tolist()) == {n if ok[i] else 255}
        return ok

    def find(self, *numbers: int) -> list[Where | None]:
        return self.tiers.find([key(n) for n in numbers])

    def close(self) -> None:
        self.tiers.close(self.close_s)
        self.stream.close()


def until(reached: Callable[[], bool], tiers: Tiers, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end, "not reached"
        tiers.wait(0.01)
        tiers.poll()


def num_objects(tiers: Tiers, name: str = "disk") -> int:
    """Return how many objects a store says that it has, 0 while it does not say."""
    return (tiers.stats().stores[name].usage or (0, 0))[1]


@contextmanager
def engine(*links: Link, **settings: object) -> Iterator[Engine]:
    made = Engine(*links, **settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


class DictStore:
    """A store that can be told to misbehave. ``gate`` holds calls up."""

    def __init__(self, *, instant: bool = False) -> None:
        self.instant, self.saves = instant, True
        self.kept: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.failing: set[str] = set()
        self.gates: dict[str, threading.Event] = {}
        self.scope: Scope | None = None
        self.closed = False

    def _enter(self, call: str, keys: Sequence[bytes]) -> None:
        self.calls.append((call, len(keys)))
        gate = self.gates.get(call)
        if gate is not None:
            gate.wait()
        if call in self.failing:
            raise ConnectionError(f"{call} is broken")

    def open(self, scope: Scope) -> None:
        self._enter("open", ())
        self.scope = scope

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("lookup", keys)
        return [each in self.kept for each in keys]

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._enter("load", keys)
        done = []
        for each, buffer in zip(keys, buffers, strict=True):
            data = self.kept.get(each)
            if data is not None and len(data) == len(buffer):
                buffer[:] = data
            done.append(data is not None and len(data) == len(buffer))
        return done

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._enter("save", keys)
        self.kept |= {each: bytes(buffer) for each, buffer in zip(keys, buffers, strict=True)}
        return [True] * len(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self._enter("release", keys)
        for each in keys:
            self.kept.pop(each, None)

    def events(self) -> list[tuple[str, bytes]]:
        return []

    def close(self) -> None:
        self.closed = True

    def usage(self) -> tuple[int, int]:
        return sum(map(len, self.kept.values())), len(self.kept)


def link(store: DictStore, name: str = "remote", limit_s: float = 20.0) -> Link:
    return Link(name=name, store=store, where=Where.CONNECTOR, limit_s=limit_s)


def located(e: Engine, *numbers: int) -> list[Where | None]:
    """Ask until no answer is awaited."""
    until(lambda: Where.PENDING not in e.find(*numbers), e.tiers)
    return e.find(*numbers)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
