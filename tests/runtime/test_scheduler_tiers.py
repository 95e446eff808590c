"""Whose state is on its way is passed in the queue by those that need not wait, and nobody's is sent for twice."""

from __future__ import annotations

import threading

import pytest
from history_model import KV, PAGE_TOKENS, STATES, VOCAB, Bench, answer, choices, window
from tiers_engine import DictStore

from treadle.graph.state import State
from treadle.runtime.request import SessionHint
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link

COMES_BACK = [(i * 5 + 1) % VOCAB for i in range(21)]
NEW = [(i * 7 + 2) % VOCAB for i in range(13)]


def over(store: DictStore, **settings: object) -> Bench:
    link = Link(name="remote", store=store, where=Where.CONNECTOR, limit_s=20.0)
    return Bench(host_bytes=1 << 18, links=[link], **settings)  # type: ignore[arg-type]


def held(name: str, call: str, **settings: object) -> tuple[Bench, DictStore, threading.Event]:
    """Return an engine whose store has the state of ``COMES_BACK`` and does not end a call before the event."""
    store, gate = DictStore(), threading.Event()
    bench = over(store, state=STATES[name])
    bench.add("before", COMES_BACK, max_tokens=2)
    bench.run().close()
    store.calls.clear()
    store.gates[call] = gate
    return over(store, state=STATES[name], **settings), store, gate


def run_until(bench: Bench, name: str) -> None:
    for _ in range(2000):
        if any(each.finish_reason for each in bench.outputs.get(name, ())):
            return
        bench.step()
    raise AssertionError(f"{name} does not end")


@pytest.mark.parametrize(("name", "call"), [*((name, "load") for name in sorted(STATES)), ("full", "lookup")])
def test_a_request_does_not_wait_while_anothers_state_is_sought_or_on_its_way(name: str, call: str) -> None:
    bench, _, gate = held(name, call)
    bench.add("a", COMES_BACK, max_tokens=6)
    bench.add("b", NEW[:3], max_tokens=6)
    run_until(bench, "b")
    assert "a" not in bench.outputs
    gate.set()
    bench.run()
    assert bench.tokens("a") == answer(COMES_BACK, 6)
    assert bench.tokens("b") == answer(NEW[:3], 6)
    assert bench.outputs["a"][0].cached_tokens == {"connector": 20}
    bench.close()


def test_who_passed_is_younger_all_the_same() -> None:
    bench, _, gate = held("full", "load", overlap=False)
    bench.add("a", COMES_BACK, max_tokens=20)
    bench.add("b", NEW[:3], max_tokens=60)
    while "b" not in bench.outputs:
        bench.step()
    gate.set()
    while "a" not in bench.outputs:
        bench.step()
    scheduler = bench.engine._scheduler
    assert [each.id for each in scheduler.running] == ["a", "b"]
    # A preempted one waits where it stood.
    bench.add("c", NEW[:3], max_tokens=1)
    for victim in list(scheduler.running):
        scheduler._preempt(victim)
    assert [each.id for each in scheduler.waiting] == ["a", "b", "c"]
    bench.run()
    assert bench.tokens("a") == answer(COMES_BACK, 20)
    assert bench.tokens("b") == answer(NEW[:3], 60)
    bench.close()


def test_only_those_pass_that_leave_room_and_a_slot() -> None:
    for settings in {"num_pages": 9}, {"max_num_seqs": 1}:
        bench, _, gate = held("full", "load", **settings)
        bench.add("a", COMES_BACK, max_tokens=2)
        bench.add("b", NEW[:3], max_tokens=2)
        bench.add("c", NEW, max_tokens=2)
        for _ in range(50):
            bench.step()
        # Of nine pages six are for the first; its growth and the others' take one each.
        assert ("b" in bench.outputs) == ("num_pages" in settings)
        assert "c" not in bench.outputs
        gate.set()
        bench.run()
        for name, prompt in ("a", COMES_BACK), ("b", NEW[:3]), ("c", NEW):
            assert bench.tokens(name) == answer(prompt, 2)
        bench.close()


def test_room_is_not_kept_twice_for_what_is_on_its_way() -> None:
    bench, _, gate = held("full", "load", num_pages=9)
    bench.add("a", COMES_BACK, max_tokens=2)
    while not bench.engine._memory._restorer.busy:
        bench.step()
    bench.add("b", NEW[:3], max_tokens=2)
    run_until(bench, "b")
    assert "a" not in bench.outputs
    # Of the four pages that are left the first wants two, one of which to grow.
    bench.add("c", NEW, max_tokens=2)
    for _ in range(20):
        bench.step()
    assert "c" not in bench.outputs
    gate.set()
    bench.run()
    for each, prompt in ("a", COMES_BACK), ("b", NEW[:3]), ("c", NEW):
        assert bench.tokens(each) == answer(prompt, 2)
    assert bench.engine.stats().preemptions == 0
    bench.close()


def test_hints_do_not_keep_out_who_waits_for_room() -> None:
    store, gate, other = DictStore(), threading.Event(), [(token + 1) % VOCAB for token in COMES_BACK]
    bench = over(store)
    bench.add("x", COMES_BACK, max_tokens=1)
    bench.add("y", other, max_tokens=1)
    bench.run().close()
    store.gates["load"] = gate
    bench = over(store, num_pages=20)
    bench.add("a", COMES_BACK, session=SessionHint(id="a", prefetch=True))
    while not bench.engine._memory._restorer.busy:
        bench.step()
    # Of twenty pages it needs eighteen, five of which are taken.
    long = [*NEW, *NEW, *NEW, *NEW, *NEW]
    bench.add("b", long, max_tokens=2)
    bench.add("c", other, session=SessionHint(id="c", prefetch=True))
    for _ in range(50):
        bench.step()
    assert bench.reason("c") == "length"
    assert not {"a", "b"} & bench.outputs.keys()
    gate.set()
    bench.run()
    assert bench.tokens("b") == answer(long, 2)
    bench.close()


def test_what_is_on_its_way_to_the_device_is_not_sent_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _, gate = held("full", "load", max_step_tokens=4, overlap=False)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    bench.add("a", COMES_BACK, max_tokens=2)
    while not bench.engine._memory._restorer.busy:
        bench.step()
    monkeypatch.setattr(tiers, "prefetch", lambda objects: pytest.fail("sent for ahead"))
    # Its prompt takes whole steps, so that nobody else is looked at.
    bench.add("b", NEW, max_tokens=2)
    run_until(bench, "b")
    gate.set()
    bench.run()
    assert bench.tokens("a") == answer(COMES_BACK, 2)
    bench.close()


def test_who_lacks_no_item_waits_for_nobody() -> None:
    # Where a chunk begins a window reaches back to nothing: pages that are there are all that it takes to go on.
    state, store, gate = State(groups=(KV, window(0, chunk=8))), DictStore(), threading.Event()
    bench = over(store, state=state)
    bench.add("before", COMES_BACK, max_tokens=2)
    bench.run().close()
    bench = over(store, state=state, checkpoint_tokens=64)
    known = [*NEW, *NEW[:8]]
    bench.add("known", known, max_tokens=2)
    bench.run()
    store.gates["load"] = gate
    bench.add("a", COMES_BACK, max_tokens=2)
    while not bench.engine._memory._restorer.busy:
        bench.step()
    bench.add("b", [*known[:18], 5], max_tokens=2)
    run_until(bench, "b")
    assert bench.tokens("b") == answer([*known[:18], 5], 2)
    assert bench.outputs["b"][0].num_cached_tokens == 16
    gate.set()
    bench.run()
    assert bench.tokens("a") == answer(COMES_BACK, 2)
    bench.close()


@pytest.mark.parametrize("name", sorted(STATES))
def test_what_several_begin_with_is_fetched_once(name: str) -> None:
    bench, store, gate = held(name, "load")
    bench.add("a", COMES_BACK, max_tokens=6)
    bench.add("b", [*COMES_BACK, 3, 1], max_tokens=6)
    ids = choices(bench, "c", COMES_BACK, 3, temperature=0.0)
    for _ in range(50):
        bench.step()
    gate.set()
    bench.run()
    for each, prompt, count in ("a", COMES_BACK, 6), ("b", [*COMES_BACK, 3, 1], 6), *((i, COMES_BACK, 9) for i in ids):
        assert bench.tokens(each) == answer(prompt, count)
        assert bench.outputs[each][0].num_cached_tokens >= 20
    restorer = bench.engine._memory._restorer
    assert restorer.restored_tokens == 20
    assert sum(count for call, count in store.calls if call == "load") <= 20 // PAGE_TOKENS + 8
    bench.close()


def test_who_waits_for_anothers_state_asks_anew_where_that_fails() -> None:
    bench, store, gate = held("full", "load")
    bench.add("a", COMES_BACK, max_tokens=6)
    bench.add("b", COMES_BACK, max_tokens=6)
    for _ in range(50):
        bench.step()
    store.failing.add("load")
    gate.set()
    bench.run()
    for each in "ab":
        assert bench.tokens(each) == answer(COMES_BACK, 6)
    assert bench.outputs["a"][0].missed_tokens["failed"] == 20
    bench.close()


def test_without_a_slot_the_first_of_the_queue_is_prepared_for_as_well() -> None:
    bench, store, _ = held("full", "save", max_num_seqs=1)
    bench.add("b", NEW, max_tokens=60)
    while "b" not in bench.outputs:
        bench.step()
    bench.add("a", COMES_BACK, max_tokens=2)
    for _ in range(30):
        bench.step()
    assert sum(count for call, count in store.calls if call == "load") == 20 // PAGE_TOKENS
    assert "a" not in bench.outputs
    store.gates.pop("save").set()
    bench.run().close()


def test_what_is_evicted_before_its_request_finds_room_is_fetched_again() -> None:
    bench, _, gate = held("full", "load", num_pages=12)
    bench.add("a", COMES_BACK, max_tokens=2)
    bench.add("b", NEW[:3], max_tokens=38)
    while len(bench.outputs.get("b", ())) < 20:
        bench.step()
    gate.set()
    restorer = bench.engine._memory._restorer
    while restorer.restored_tokens == 0:
        bench.step()
    waits = "a" not in bench.outputs
    bench.run()
    assert bench.tokens("a") == answer(COMES_BACK, 2)
    assert bench.tokens("b") == answer(NEW[:3], 38)
    assert sum(bench.outputs["a"][0].cached_tokens.values()) == 20
    assert waits
    assert restorer.restored_tokens > 20
    bench.close()


@pytest.mark.parametrize("name", sorted(STATES))
def test_nobody_comes_in_before_tiers_were_asked(name: str) -> None:
    """Where there is room for a request because it shares pages, and would be none for all of its own."""
    bench = Bench(state=STATES[name], num_pages=28, others=60, host_bytes=1 << 20, max_len=100)
    shared = [(i * i) % VOCAB for i in range(40)]
    long = shared + [(i * 7 + i * i) % VOCAB for i in range(41)]
    bench.add("before", long, max_tokens=2)
    bench.run()
    for k in range(6):
        bench.add(f"other {k}", [(k * 5 + 3 + i**3) % VOCAB for i in range(96)], max_tokens=2)
        bench.run()
    bench.add("a", [*shared, 1, 2, 3], max_tokens=40)
    while "a" not in bench.outputs:
        bench.step()
    bench.add("b", long, max_tokens=2)
    bench.run()
    assert bench.tokens("b") == answer(long, 2)
    assert bench.outputs["b"][0].num_cached_tokens == 80
    bench.close()
