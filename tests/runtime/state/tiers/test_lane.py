from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tiers_engine import Clock, DictStore, engine, key
from tiers_engine import until as settled

from treadle.runtime.state.tiers import lane as module
from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.lane import Lane, Work, ignore
from treadle.runtime.state.tiers.seal import SEAL_BYTES
from treadle.runtime.state.tiers.store import Scope
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link

SCOPE = Scope(
    namespace=bytes(16),
    memory=memoryview(b""),
    holds=lambda keys: [False] * len(keys),
    offer=lambda *_: nullcontext(None),
)


def until(reached: Callable[[], bool], lane: Lane) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end
        lane.poll()
        time.sleep(0.001)


@contextmanager
def opened(store: DictStore, clock: Callable[[], float] = time.monotonic) -> Iterator[Lane]:
    lane = Lane("test", store, SCOPE, clock=clock)
    try:
        until(lambda: lane.waiting == 0, lane)
        yield lane
    finally:
        lane.close(5.0)


def test_the_store_is_opened_by_a_thread_and_closed_once_no_call_runs() -> None:
    store, gate = DictStore(), threading.Event()
    with opened(store) as lane:
        assert lane.is_open
        assert store.scope is SCOPE
        store.gates["lookup"] = gate
        lane.submit("lookup", [key(1)], ignore, limit_s=20)
        until(lambda: ("lookup", 1) in store.calls, lane)
        lane.close(0.01)
        assert not store.closed
        assert not lane.submit("lookup", [key(1)], ignore, limit_s=20)
        gate.set()
    until(lambda: store.closed, lane)


def test_outcomes_come_out_of_poll_on_the_callers_thread() -> None:
    seen: list[tuple[dict[bytes, bool], int]] = []

    def note(work: Work) -> None:
        seen.append((work.outcome, threading.get_ident()))

    store = DictStore()
    store.kept[key(1)] = b""
    with opened(store) as lane:
        lane.submit("lookup", [key(1), key(2)], note, limit_s=20)
        until(lambda: len(seen) == 1, lane)
    assert seen == [({key(1): True, key(2): False}, threading.get_ident())]


def test_what_waits_behind_a_hanging_call_is_given_up_too_and_never_made() -> None:
    store, gate, clock, seen = DictStore(), threading.Event(), Clock(), list[tuple[str, int, bool]]()
    store.gates["lookup"] = gate
    with opened(DictStore(), clock) as lane:
        lane.store = store
        for n in (1, 2):
            lane.submit(
                "lookup", [key(n)], lambda work, n=n: seen.append(("settled", n, work.late)), limit_s=1,
                release=lambda work, n=n: seen.append(("over", n, work.late)),
            )  # fmt: skip
        until(lambda: ("lookup", 1) in store.calls, lane)
        clock.now += 1
        lane.poll()
        # The one that hangs may still use its memory; the other never will.
        assert seen == [("settled", 1, True), ("settled", 2, False), ("over", 2, False)]
        assert lane.waiting == 1
        gate.set()
        until(lambda: lane.waiting == 0, lane)
        assert seen[3:] == [("over", 1, True)]
        assert lane.refuses("lookup")
        clock.now += 1
        lane.submit("lookup", [key(3)], ignore, limit_s=1)
        until(lambda: lane.waiting == 0, lane)
        assert store.calls == [("lookup", 1)] * 2
        assert lane.stats["lookup"].timeouts == 2


def test_what_waits_for_its_turn_is_patient_while_the_store_answers_others() -> None:
    store, gate, clock = DictStore(), threading.Event(), Clock()
    store.gates["lookup"] = gate
    outcomes: dict[int, dict[bytes, bool]] = {}
    with opened(DictStore(), clock) as lane:
        lane.store = store
        for n in range(12):
            store.kept[key(n)] = b""
            lane.submit("lookup", [key(n)], lambda work, n=n: outcomes.update({n: work.outcome}), limit_s=1)
        for n in range(6):
            until(lambda n=n: len(store.calls) == n + 1, lane)
            clock.now += 0.75
            held = store.gates["lookup"] = threading.Event()
            gate.set()
            gate = held
            until(lambda n=n: n in outcomes, lane)
        # A quarter of the limit before it: four times the limit are over now, for those that have not begun.
        until(lambda: len(outcomes) == 12, lane)
        assert [all(outcomes[n].values()) for n in range(12)] == [True] * 6 + [False] * 6
        assert not lane.held_off("lookup")
        assert (lane.stats["lookup"].timeouts, lane.stats["lookup"].held_off) == (0, 6)
        gate.set()


def test_it_refuses_while_its_breaker_pauses_and_not_when_a_probe_is_due() -> None:
    store, clock = DictStore(), Clock()
    store.failing = {"load"}
    with opened(store, clock) as lane:
        for _ in range(3):
            assert not lane.refuses("load")
            lane.submit("load", [key(1)], ignore, limit_s=1, prepare=lambda: ([], []))
            until(lambda: lane.waiting == 0, lane)
        assert lane.refuses("load")
        assert not lane.refuses("lookup")
        clock.now += 1.0
        assert not lane.refuses("load")
        assert lane.held_off("load")


def test_a_save_is_late_only_once_its_turn_has_come() -> None:
    store, gate, clock, late = DictStore(), threading.Event(), Clock(), list[bool]()
    store.gates["save"] = gate
    with opened(store, clock) as lane:
        for n in (1, 2):
            prepare = lambda n=n: ([key(n)], [memoryview(b"abc")])  # noqa: E731
            lane.submit("save", [key(n)], lambda work: late.append(work.late), limit_s=1, prepare=prepare)
        until(lambda: ("save", 1) in store.calls, lane)
        clock.now += 1
        lane.poll()
        assert late == [True]
        gate.set()
        until(lambda: lane.waiting == 0, lane)
        assert late == [True, False]
        assert sorted(store.kept) == [key(1), key(2)]


def test_too_much_waiting_and_wrong_answers_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    store, gate = DictStore(), threading.Event()
    with opened(store) as lane:
        store.gates["lookup"] = gate
        taken = [lane.submit("lookup", [key(n)], ignore, limit_s=20) for n in range(6)]
        assert taken.count(True) in (2, 3)
        assert lane.stats["lookup"].held_off == taken.count(False)
        gate.set()
        until(lambda: lane.waiting == 0, lane)
        store.lookup = lambda keys: [True, True, True]  # type: ignore[method-assign]
        lane.submit("lookup", [key(1)], ignore, limit_s=20)
        until(lambda: lane.waiting == 0, lane)
        assert lane.last_error == "ValueError: 3 outcomes for 1 keys"


def test_an_instant_store_is_asked_at_once_and_may_fail() -> None:
    store = DictStore(instant=True)
    store.kept[key(1)] = b""
    with opened(store) as lane:
        assert list(lane.peek([key(1), key(2)])) == [True, False]
        store.failing = {"lookup"}
        assert list(lane.peek([key(1), key(2)])) == [False, False]
        assert lane.stats["lookup"].errors == 1
        store.lookup = lambda keys: [True]  # type: ignore[method-assign]
        assert list(lane.peek([key(1), key(1)])) == [False, False]
        assert lane.last_error == "ValueError: 1 outcomes for 2 keys"
        store.usage = lambda: None  # type: ignore[method-assign, assignment, return-value]
        assert lane.usage() is None


def test_a_store_that_never_opens_costs_limits_and_does_not_keep_anybody_from_closing() -> None:
    store, gate, clock, outcomes = DictStore(), threading.Event(), Clock(), list[dict[bytes, bool]]()
    store.gates["open"] = gate
    lane = Lane("test", store, SCOPE, clock=clock)
    lane.submit("load", [key(1)], lambda work: outcomes.append(work.outcome), limit_s=1)
    clock.now += 1
    lane.poll()
    assert outcomes == [{key(1): False}]
    assert not lane.is_open
    lane.close(0.01)
    assert not store.closed
    gate.set()
    until(lambda: store.closed, lane)


@pytest.mark.parametrize("instant", [True, False])
def test_wrong_bytes_count_against_a_store_that_may_offer_them_again(instant: bool) -> None:
    store = DictStore(instant=instant)
    store.kept = {key(n): bytes(SEAL_BYTES + 8) for n in range(4)}
    with opened(store) as lane:
        for n in range(4):
            buffers = [key(n)], [memoryview(bytearray(SEAL_BYTES + 8))]
            lane.submit("load", [key(n)], ignore, limit_s=20, prepare=lambda given=buffers: given)
            until(lambda: lane.waiting == 0, lane)
        assert lane.held_off("load") is not instant
        assert lane.stats["load"].corrupt == (4 if instant else 3)
        assert len(store.kept) == 4 - lane.stats["load"].corrupt
        assert "not what had been saved" in lane.last_error


def test_damaged_files_are_read_once_each_and_the_disk_is_used_on(tmp_path: Path) -> None:
    """Many in a row are no reason to leave the disk alone: it would be asked for the others at every request."""
    store, numbers = DiskStore(tmp_path, 1 << 30), range(1, 13)
    link = Link(name="disk", store=store, where=Where.DISK, limit_s=20)

    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if len(path.name) == 32 and path.is_file()]

    def fetch_all() -> list[bool]:
        for n in numbers:
            e.tiers._pool.drop(key(n))
        return [ok for n in numbers for ok in e.fetch(n)]

    with engine(link, host=32) as e:
        assert all(e.sink(*numbers))
        settled(lambda: len(files()) == len(numbers), e.tiers)
        for path in files():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert fetch_all() == [False] * len(numbers)
        assert e.find(*numbers) == [None] * len(numbers)
        assert files() == []
        assert fetch_all() == [False] * len(numbers)
        disk_stats = e.tiers.stats().stores["disk"]
        assert (disk_stats.calls["load"].corrupt, disk_stats.calls["load"].calls) == (len(numbers), len(numbers))
        assert not disk_stats.held_off
        e.sink(*numbers)
        settled(lambda: len(files()) == len(numbers), e.tiers)
        assert fetch_all() == [True] * len(numbers)
