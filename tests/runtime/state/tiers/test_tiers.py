from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers_engine import ITEM, SIZE, Clock, DictStore, engine, key, link, located, num_objects, page, until

from treadle.kernels.backend.cuda import CudaBackend
from treadle.runtime.state.tiers import pace
from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.ticket import Ticket, Where
from treadle.runtime.state.tiers.tiers import Link


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


def test_a_store_that_hangs_costs_its_limit_and_its_memory_stays_out_of_use() -> None:
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


def test_a_chain_of_host_and_disk_outlives_the_engine_and_can_be_cleared(tmp_path: Path) -> None:
    def disk() -> Link:
        return Link(name="disk", store=DiskStore(tmp_path, 1 << 20), where=Where.DISK, limit_s=20.0)

    with engine(disk()) as e:
        e.sink(1, 2, 3)
        until(lambda: num_objects(e.tiers) == 3, e.tiers)
    with engine(disk()) as e:
        until(lambda: e.tiers.stats().stores["disk"].is_open, e.tiers)
        assert e.find(1, 2, 4) == [Where.DISK, Where.DISK, None]
        e.arena[: 8 * SIZE] = 99
        assert e.fetch(2, 1) == [True, True]
        assert e.find(1, 3) == [Where.HOST, Where.DISK]
        e.tiers.clear()
        until(lambda: e.find(1, 2, 3) == [None] * 3, e.tiers)
        assert list(tmp_path.rglob("0" * 31 + "?")) == []


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


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_tickets_end_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    draw, store = random.Random(seed), DictStore()
    with engine(link(store), host=12) as e:
        tickets: list[tuple[Ticket, list[int], int | None]] = []
        free = [range(at, at + 4) for at in range(32, 64, 4)]

        def settle() -> None:
            for ticket, numbers, at in [each for each in tickets if each[0].done]:
                tickets.remove((ticket, numbers, at))
                if at is not None:
                    free.append(range(at, at + 4))
                    for i, n in enumerate(numbers):
                        want = n if ticket.ok[i] else 255
                        assert set(e.arena[(at + i) * SIZE : (at + i + 1) * SIZE].tolist()) == {want}

        for _ in range(400):
            numbers = draw.sample(range(24), draw.randint(1, 4))
            store.failing = {call for call in ("load", "save", "lookup", "release") if draw.random() < 0.05}
            match draw.randrange(9):
                case 0 | 1 | 2:
                    tickets.append((e.tiers.sink([page(n) for n in numbers]), numbers, None))
                case 3 | 4 if free:
                    at = free.pop()[0]
                    e.arena[at * SIZE : (at + 4) * SIZE] = 255
                    objects = [page(n, at + i) for i, n in enumerate(numbers)]
                    tickets.append((e.tiers.fetch(objects), numbers, at))
                case 5:
                    tickets.append((e.tiers.prefetch([page(n) for n in numbers]), numbers, None))
                case 6:
                    e.tiers.drop([key(n) for n in numbers])
                case 7:
                    e.tiers.pin([key(n) for n in numbers], draw.random() < 0.5)
                    e.find(*numbers)
                case _:
                    e.tiers.demote([key(n) for n in numbers])
                    if (spoiled := draw.choice([*store.kept, None])) is not None:
                        store.kept[spoiled] = bytes(ITEM)
            if draw.random() < 0.7:
                e.tiers.wait(0.001)
                e.tiers.poll()
                settle()
        store.failing = set()
        until(lambda: all(ticket.done for ticket, _, _ in tickets), e.tiers)
        settle()
        until(lambda: e.tiers._lanes["remote"].waiting == 0, e.tiers)
        e.tiers.pin([key(n) for n in range(24)], pinned=False)
        e.tiers.drop([key(n) for n in range(24)])
        stats = e.tiers.stats()
        assert (stats.used_bytes, stats.pinned_bytes, stats.flight_bytes, stats.num_objects) == (0, 0, 0, 0)
        assert not e.tiers.busy
        assert stats.lifted > 0


@pytest.mark.gpu
def test_objects_leave_a_gpu_and_come_back() -> None:
    store = DictStore()
    with engine(link(store), host=8, backend=CudaBackend()) as e:
        e.stream.submit(e.arena[SIZE : 2 * SIZE].fill_, 77)
        assert e.sink(1, 2, 3) == [True] * 3
        e.stream.submit(e.arena[: 8 * SIZE].fill_, 99).wait()
        assert e.finish(e.tiers.fetch([page(1, 50), page(2, 51)])) == [True, True]
        assert e.arena[50 * SIZE : 52 * SIZE].tolist() == [77] * SIZE + [2] * SIZE
        until(lambda: len(store.kept) == 3, e.tiers)
        e.tiers._pool.drop(key(3))
        assert e.finish(e.tiers.fetch([page(3, 52)])) == [True]
        assert set(e.arena[52 * SIZE : 53 * SIZE].tolist()) == {3}


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not reached():
        assert time.monotonic() < end, "not reached"
        time.sleep(0.001)


def test_while_steps_run_copies_to_the_arena_begin_in_the_midst_of_one_and_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "LEAST_BYTES", 1)
    clock = Clock()
    with engine(clock=clock) as e:
        objects = [page(n) for n in range(6)]
        assert e.finish(e.tiers.sink(objects)) == [True] * 6
        e.tiers.poll(steps=True)
        gate = threading.Event()
        e.stream.submit(gate.wait)
        ticket = e.tiers.fetch([page(n, 50 + n) for n in range(6)])
        later = threading.Event()
        e.stream.submit(later.wait)
        e.tiers.poll(steps=True)
        # The step that may still read what lies there is not over.
        assert e.tiers.stats().lifted == 0
        gate.set()
        wait_for(lambda: e.tiers._rising[0].mark.done)
        # The clock stands still: no step has time for more than one object.
        for count in range(1, 7):
            e.tiers.poll(steps=True)
            wait_for(lambda: e.tiers._mover.ready)
            assert len(e.tiers._rising) == 6 - count
        e.tiers.poll(steps=True)
        assert ticket.ok == [True] * 6
        assert not later.is_set(), "the step in flight was not waited for"
        later.set()
        assert set(e.arena[55 * SIZE : 56 * SIZE].tolist()) == set(e.arena[5 * SIZE : 6 * SIZE].tolist())


def test_what_was_to_be_copied_has_failed_when_tiers_are_closed() -> None:
    with engine() as e:
        assert e.sink(1) == [True]
        e.tiers.poll(steps=True)
        gate = threading.Event()
        e.stream.submit(gate.wait)
        ticket = e.tiers.fetch([page(1, 50)])
        assert e.tiers.busy
        e.tiers.close()
        gate.set()
        assert ticket.done
        assert ticket.ok == [False]


def test_what_a_store_gives_while_tiers_are_closed_has_failed() -> None:
    store = DictStore()
    with engine(link(store)) as e:
        assert e.sink(1) == [True]
        until(lambda: key(1) in store.kept, e.tiers)
    with engine(link(store)) as e:
        until(lambda: e.find(1) == [Where.CONNECTOR], e.tiers)
        gate = store.gates["load"] = threading.Event()
        ticket = e.tiers.fetch([page(1, 50)])
        threading.Timer(0.1, gate.set).start()
        e.tiers.close()
        assert ticket.done
        assert ticket.ok == [False]
        assert not e.tiers._rising
