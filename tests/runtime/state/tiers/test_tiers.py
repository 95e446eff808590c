from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from treadle.kernels.backend.cpu import CpuBackend
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

    def __init__(self, *links: Link, host: int = 16, model: str = "m", **settings: object) -> None:
        backend = CpuBackend(threads=1)
        self.arena = torch.arange(ARENA, dtype=torch.uint8).repeat_interleave(SIZE)
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
        self.tiers.close()
        self.stream.close()


def until(reached: Callable[[], bool], tiers: Tiers, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end, "not reached"
        tiers.wait(0.01)
        tiers.poll()


@contextmanager
def engine(*links: Link, **settings: object) -> Iterator[Engine]:
    made = Engine(*links, **settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def test_objects_go_down_and_come_back_to_other_places() -> None:
    with engine() as e:
        assert e.sink(1, 2, 3) == [True] * 3
        assert e.find(1, 2, 3, 4) == [Where.HOST] * 3 + [None]
        e.arena[: 8 * SIZE] = 99
        assert e.fetch(3, 1, 4) == [True, True, False]
        stats = e.tiers.stats()
        assert (stats.sunk, stats.lifted, stats.host_hits, stats.num_objects) == (3, 2, 2, 3)
        assert (stats.used_bytes, stats.flight_bytes) == (3 * ITEM, 0)


def test_a_copy_waits_for_what_was_launched_before_and_nothing_waits_for_the_copy() -> None:
    import threading

    with engine() as e:
        gate = threading.Event()
        e.stream.submit(gate.wait)
        e.stream.submit(e.arena[SIZE : 2 * SIZE].fill_, 77)
        ticket = e.tiers.sink([page(1)])
        e.tiers.poll()
        assert not ticket.done
        assert e.tiers.busy
        gate.set()
        assert e.finish(ticket) == [True]
        e.finish(e.tiers.fetch([page(1, 50)]))
        assert set(e.arena[50 * SIZE : 51 * SIZE].tolist()) == {77}


def test_a_ticket_changes_in_poll_only() -> None:
    with engine() as e:
        ticket = e.tiers.sink([page(1)])
        e.tiers.wait(5.0)
        assert not ticket.done
        e.tiers.poll()
        assert ticket.done


def test_the_same_object_sinks_once() -> None:
    with engine() as e:
        tickets = [e.tiers.sink([page(1), page(1)]), e.tiers.sink([page(1)])]
        assert [e.finish(each) for each in tickets] == [[True, True], [True]]
        assert e.sink(1) == [True]
        assert e.tiers.stats().sunk == 1


def test_what_finds_no_room_is_refused_at_once_and_counted() -> None:
    with engine(host=4) as e:
        ticket = e.tiers.sink([page(n) for n in range(6)])
        # Half of the pool may be on its way.
        assert e.finish(ticket) == [True, True, False, False, False, False]
        assert e.tiers.stats().sinks_refused == 4
        assert e.tiers.pin([key(0), key(1), key(9)]) == [True, True, False]
        assert e.sink(2, 3) == [True, True]
        assert e.tiers.pin([key(2)]) == [False]
        assert e.sink(4, 5) == [True, True]
        assert e.find(0, 1, 2, 3, 4, 5) == [Where.HOST, Where.HOST, None, None, Where.HOST, Where.HOST]
        e.tiers.pin([key(0)], pinned=False)
        e.tiers.demote([key(0)])
        assert e.sink(6) == [True]
        assert e.find(0, 6) == [None, Where.HOST]
        e.tiers.drop([key(6)])
        assert e.find(6) == [None]


class DictStore:
    """A store that can be told to misbehave. ``gate`` holds calls up."""

    def __init__(self, *, instant: bool = False) -> None:
        self.instant, self.saves = instant, True
        self.kept: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.failing: set[str] = set()
        self.gates: dict[str, object] = {}
        self.scope: Scope | None = None
        self.closed = False

    def _enter(self, call: str, keys: Sequence[bytes]) -> None:
        self.calls.append((call, len(keys)))
        gate = self.gates.get(call)
        if gate is not None:
            gate.wait()  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("instant", [False, True])
def test_what_sinks_is_saved_and_comes_back_through_the_host(instant: bool) -> None:
    store = DictStore(instant=instant)
    with engine(link(store)) as e:
        assert e.sink(1, 2) == [True, True]
        until(lambda: len(store.kept) == 2, e.tiers)
    assert store.closed
    with engine(link(store), host=2) as e:
        until(lambda: e.tiers.stats().stores["remote"].is_open, e.tiers)
        assert located(e, 1, 2, 3) == [Where.CONNECTOR, Where.CONNECTOR, None]
        e.arena[: 8 * SIZE] = 99
        # More than the pool's half at once: loads wait for each other.
        assert e.fetch(2, 3, 1) == [True, False, True]
        assert e.find(1, 2) == [Where.HOST, Where.HOST]
        loads = e.tiers.stats().stores["remote"].calls["load"]
        assert (loads.done, loads.num_bytes) == (2, 2 * ITEM)
        saves = len([call for call, _ in store.calls if call == "save"])
        assert e.sink(9) == [True]
        until(lambda: key(9) in store.kept, e.tiers)
        assert len([call for call, _ in store.calls if call == "save"]) == saves + 1


def test_an_object_that_several_want_is_loaded_once_and_prefetch_needs_no_place() -> None:
    import threading

    store, gate = DictStore(), threading.Event()
    with engine(link(store)) as e:
        e.sink(1)
        until(lambda: len(store.kept) == 1, e.tiers)
        e.tiers._pool.drop(key(1))
        store.gates["load"] = gate
        tickets = [e.tiers.fetch([page(1, 50)]), e.tiers.fetch([page(1, 51)]), e.tiers.prefetch([page(1)])]
        gate.set()
        assert [e.finish(each) for each in tickets] == [[True]] * 3
        assert [call for call in store.calls if call[0] == "load"] == [("load", 1)]
        assert set(e.arena[50 * SIZE : 52 * SIZE].tolist()) == {1}
        assert e.finish(e.tiers.prefetch([page(1)])) == [True]


def test_garbage_is_a_miss_is_counted_and_forgotten() -> None:
    store = DictStore()
    with engine(link(store)) as e:
        e.sink(1, 2, 3, 4)
        until(lambda: len(store.kept) == 4, e.tiers)
        whole = store.kept[key(1)]
        store.kept[key(1)] = whole[:700] + bytes([whole[700] ^ 1]) + whole[701:]
        store.kept[key(2)] = bytes(len(whole))
        store.kept[key(3)] = store.kept[key(4)]
        for n in range(1, 5):
            e.tiers._pool.drop(key(n))
        assert e.fetch(1, 2, 3, 4) == [False, False, False, True]
        assert e.tiers.stats().stores["remote"].calls["load"].corrupt == 3
        assert set(store.kept) == {key(4)}


def test_objects_of_another_model_are_misses() -> None:
    store = DictStore()
    with engine(link(store)) as e:
        e.sink(1)
        until(lambda: len(store.kept) == 1, e.tiers)
    with engine(link(store), model="another") as e:
        assert e.fetch(1) == [False]


def test_the_next_store_is_asked_when_one_fails() -> None:
    first, second = DictStore(), DictStore()
    with engine(link(first, "first"), link(second, "second")) as e:
        e.sink(1, 2)
        until(lambda: len(first.kept) == len(second.kept) == 2, e.tiers)
        del first.kept[key(1)]
        for n in (1, 2):
            e.tiers._pool.drop(key(n))
        assert e.fetch(1, 2) == [True, True]
        assert e.tiers.stats().stores["second"].calls["load"].keys == 1
        first.failing = {"load"}
        e.tiers._pool.drop(key(2))
        assert e.fetch(2) == [True]
        stats = e.tiers.stats().stores
        assert stats["first"].calls["load"].errors == 1
        assert stats["first"].last_error == "ConnectionError: load is broken"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_store_that_hangs_costs_its_limit_and_its_memory_stays_out_of_use() -> None:
    import threading

    store, gate, clock = DictStore(), threading.Event(), Clock()
    with engine(link(store, limit_s=2.0), clock=clock) as e:
        e.sink(1)
        until(lambda: len(store.kept) == 1, e.tiers)
        e.tiers._pool.drop(key(1))
        store.gates["load"] = gate
        ticket = e.tiers.fetch([page(1, 50)])
        until(lambda: ("load", 1) in store.calls, e.tiers)
        e.tiers.poll()
        assert not ticket.done
        clock.now += 2.0
        e.tiers.poll()
        assert ticket.done
        assert ticket.ok == [False]
        stats = e.tiers.stats()
        assert stats.stores["remote"].calls["load"].timeouts == 1
        assert stats.flight_bytes == SIZE
        # The engine goes on: the same object sinks again although the store may still write where it was to go.
        assert e.sink(1) == [True]
        gate.set()
        until(lambda: e.tiers.stats().flight_bytes == 0, e.tiers)
        assert e.tiers.stats().used_bytes == ITEM
        assert e.fetch(1) == [True]


def test_a_dead_store_is_left_alone_and_tried_again() -> None:
    store, clock = DictStore(), Clock()
    store.failing = {"open"}
    with engine(link(store), clock=clock) as e:
        for n in range(6):
            e.sink(n)
            until(lambda: e.tiers._lanes["remote"].waiting == 0, e.tiers)
        stats = e.tiers.stats().stores["remote"]
        assert (stats.calls["save"].errors, stats.calls["save"].held_off) == (3, 3)
        assert (stats.held_off, stats.is_open) == (True, False)
        store.failing = set()
        clock.now += 1.0
        e.sink(7)
        until(lambda: key(7) in store.kept, e.tiers)
        until(lambda: not e.tiers.stats().stores["remote"].held_off, e.tiers)
        assert e.tiers.stats().stores["remote"].is_open


def test_metrics_have_names_docs_and_labels_that_do_not_clash() -> None:
    with engine(link(DictStore())) as e:
        e.sink(1)
        e.find(1, 2)
        metrics = list(e.tiers.stats().metrics())
    assert len({(m.name, *m.labels.items()) for m in metrics}) == len(metrics)
    assert all(m.doc.endswith(".") and m.kind in ("counter", "gauge") for m in metrics)
    values = {m.name: m.value for m in metrics}
    assert values["kv_offload_store_bytes"] == SIZE
    assert values["kv_offload_cpu_cache_usage_perc"] == pytest.approx(1 / 16)
