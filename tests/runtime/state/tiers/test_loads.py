from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tiers_engine import SIZE, UNITS, Clock, DictStore, Engine, engine, key, link, located, page, until

from treadle.runtime.state.tiers.ticket import Object, Where


def fill(e: Engine, *stores: DictStore, objects: int = 12) -> None:
    """Put objects into the stores and not into the host's pool."""
    for n in range(objects):
        e.sink(n)
        until(lambda n=n: all(len(store.kept) == n + 1 for store in stores), e.tiers)
        e.tiers._pool.drop(key(n))
    assert located(e, *range(objects)) == [Where.CONNECTOR] * objects


def test_a_store_that_hangs_costs_one_limit_and_keeps_the_room_of_its_threads_only() -> None:
    store, gate, clock = DictStore(), threading.Event(), Clock()
    with engine(link(store, limit_s=2.0), clock=clock, host=64) as e:
        fill(e, store)
        store.gates["load"] = gate
        ticket = e.tiers.fetch([page(n, 40 + n) for n in range(12)])
        until(lambda: [call for call, _ in store.calls].count("load") == 2, e.tiers)
        clock.now += 2.0
        e.tiers.poll()
        assert ticket.done
        assert not any(ticket.ok)
        # Two threads, three objects in each call; what they had not begun is not theirs any more.
        assert e.tiers.stats().flight_bytes == 6 * SIZE
        # The breaker is open: nobody waits, for an answer or for room.
        again = e.tiers.fetch([page(n, 40 + n) for n in range(12)])
        assert again.done
        assert not any(again.ok)
        gate.set()
        until(lambda: e.tiers.stats().flight_bytes == 0, e.tiers)
        clock.now += 1.0
        assert e.fetch(1) == [True]


def test_what_waits_for_room_that_a_hanging_store_keeps_is_given_up_at_the_stores_limit() -> None:
    store, gate, clock = DictStore(), threading.Event(), Clock()
    with engine(link(store, limit_s=2.0), clock=clock, host=2) as e:
        fill(e, store)
        store.gates["load"] = gate
        # One object may be on its way at a time.
        ticket = e.tiers.fetch([page(n, 40 + n) for n in range(3)])
        until(lambda: ("load", 1) in store.calls, e.tiers)
        clock.now += 1.9
        e.tiers.poll()
        assert not ticket.done
        clock.now += 0.1
        e.tiers.poll()
        assert ticket.done
        assert not any(ticket.ok)
        gate.set()


def test_what_waits_for_room_waits_for_as_long_as_others_arrive() -> None:
    store, clock = DictStore(), Clock()
    with engine(link(store, limit_s=2.0), clock=clock, host=2) as e:
        fill(e, store)
        gates = [threading.Event() for _ in range(6)]
        left = iter(gates)

        def enter(call: str, keys: object) -> None:
            store.calls.append((call, 1))
            if call == "load":
                next(left).wait()

        store._enter = enter  # type: ignore[method-assign, assignment]
        ticket = e.tiers.fetch([page(n, 40 + n) for n in range(6)])
        for n, gate in enumerate(gates):
            until(lambda n=n: [call for call, _ in store.calls].count("load") == n + 1, e.tiers)
            clock.now += 1.5
            e.tiers.poll()
            assert not ticket.done
            gate.set()
        assert e.finish(ticket) == [True] * 6


def test_what_a_store_does_not_give_in_time_is_asked_of_the_next() -> None:
    first, second, gate, clock = DictStore(), DictStore(), threading.Event(), Clock()
    with engine(link(first, "first", 2.0), link(second, "second", 2.0), clock=clock, host=64) as e:
        fill(e, first, second)
        first.gates["load"] = gate
        ticket = e.tiers.fetch([page(n, 40 + n) for n in range(12)])
        until(lambda: [call for call, _ in first.calls].count("load") == 2, e.tiers)
        clock.now += 2.0
        assert e.finish(ticket) == [True] * 12
        # Two calls of three objects keep their places.
        assert e.tiers.stats().flight_bytes == 6 * SIZE
        gate.set()


@pytest.mark.parametrize("host", [4, 7])
def test_a_store_that_hangs_leaves_others_room_in_a_small_pool(host: int) -> None:
    first, second, gate, clock = DictStore(), DictStore(), threading.Event(), Clock()
    links = [replace(link(first, "first", 2.0), readers=4), link(second, "second", 2.0)]
    with engine(*links, clock=clock, host=host) as e:
        fill(e, first, second)
        first.gates["load"] = gate
        ticket = e.tiers.prefetch([page(n) for n in range(6)])
        until(lambda: ("load", 1) in first.calls, e.tiers)

        def done() -> bool:
            clock.now += 0.1
            return ticket.done

        until(done, e.tiers)
        e.tiers._known["first"].note([key(7), key(8)], False)
        assert e.fetch(7, 8) == [True, True]
        gate.set()


def test_an_object_that_is_here_in_another_length_is_a_miss() -> None:
    with engine(link(DictStore())) as e:
        assert e.sink(1) == [True]
        assert e.finish(e.tiers.fetch([Object(key(1), "page", 50 * UNITS, SIZE // 2)])) == [False]


def test_what_waits_for_room_while_tiers_are_closed_has_failed() -> None:
    store, gate = DictStore(), threading.Event()
    with engine(link(store), host=2) as e:
        fill(e, store, objects=3)
        store.gates["load"] = gate
        ticket = e.tiers.fetch([page(n, 40 + n) for n in range(3)])
        threading.Timer(0.1, gate.set).start()
        e.tiers.close()
        assert ticket.done
        assert ticket.ok == [False] * 3


def test_what_a_connector_does_not_give_is_not_asked_for_again_at_once_and_saved_anew() -> None:
    store, clock = DictStore(), Clock()
    with engine(link(store), clock=clock) as e:
        fill(e, store, objects=3)
        store.kept.pop(key(1))
        store.kept[key(2)] = bytes(len(store.kept[key(2)]))
        assert e.fetch(0, 1, 2) == [True, False, False]
        assert e.find(0, 1, 2) == [Where.HOST, None, None]
        calls = store.calls.count(("load", 1))
        assert e.fetch(1, 2) == [False, False]
        assert store.calls.count(("load", 1)) == calls
        assert e.sink(1, 2) == [True, True]
        until(lambda: {key(1), key(2)} <= set(store.kept), e.tiers)
