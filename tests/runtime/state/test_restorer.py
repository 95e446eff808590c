"""What comes back from tiers, and what happens if it does not."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Any

import pytest
from arenas import make_arena
from history_model import PAGE_TOKENS, STATES, VOCAB, Bench, answer
from tiers_engine import DictStore

from treadle.runtime.request import Abort, Request, SamplingParams
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.node import TOKEN_TYPE, Node
from treadle.runtime.state.restorer import Restorer, _Job
from treadle.runtime.state.tiers.ticket import Object, Ticket, Where
from treadle.runtime.state.tiers.tiers import Link

REQUEST = Request(id="r", prompt=[1], params=SamplingParams())


def conversation(bench: Bench, turns: int) -> list[int]:
    """Hold a conversation whose state is evicted from the device after every turn; return how much was cached."""
    history, cached = [(i * 5 + 1) % VOCAB for i in range(21)], []
    for turn in range(turns):
        bench.add(f"{turn}", history, max_tokens=6)
        bench.run()
        assert bench.tokens(f"{turn}") == answer(history, 6)
        cached.append(bench.outputs[f"{turn}"][0].num_cached_tokens)
        history = [*history, *bench.tokens(f"{turn}"), 3, turn]
        bench.engine._scheduler.memory.cache.tree.clear()
        assert all(pool.used == 0 for pool in bench.arena.pools)
    return cached


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_conversation_comes_back_whole(name: str) -> None:
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    # Models that need snapshots go on in the middle of a page, others at the last one's end.
    assert conversation(bench, 3) == ([0, 24, 32] if name == "full" else [0, 26, 34])
    bench.close()


@pytest.mark.parametrize("name", sorted(STATES))
def test_what_is_on_the_device_is_not_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    monkeypatch.setattr(tiers, "fetch", lambda objects: pytest.fail("fetched"))
    history = [(i * 5 + 1) % VOCAB for i in range(21)]
    for turn in range(3):
        bench.add(f"{turn}", history, max_tokens=6)
        bench.run()
        history = [*history, *bench.tokens(f"{turn}"), 3, turn]
        while bench.engine._memory.busy:
            bench.engine._memory.poll()
    assert bench.outputs["2"][0].num_cached_tokens >= 32
    bench.close()


@pytest.mark.parametrize("lost", ["all", "first", "last"])
@pytest.mark.parametrize("name", sorted(STATES))
def test_a_load_that_fails_is_a_miss(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    fetch = tiers.fetch
    fetched = []

    def failing(objects: Iterable[Object]) -> Ticket:
        ticket = fetch(objects)
        settle = ticket.settle
        bad = {"all": range(len(ticket.ok)), "first": [0], "last": [len(ticket.ok) - 1]}[lost]
        monkeypatch.setattr(ticket, "settle", lambda index, ok: settle(index, ok and index not in bad))
        for index in bad:
            ticket.ok[index] = False
        fetched.append(len(ticket.ok))
        return ticket

    monkeypatch.setattr(tiers, "fetch", failing)
    cached = conversation(bench, 3)
    assert len(fetched) == 2
    assert cached[1] < 24
    assert cached[2] < 32
    assert bench.engine.stats().prefix_missed_tokens["failed"] == bench.engine._memory._restorer.failed_tokens > 0
    assert bench.engine._scheduler.heal() == {}
    bench.close()


class SlowStore(DictStore):
    """Takes its time to say what it has."""

    slow_s = 0.3

    def lookup(self, keys: Ordered[bytes]) -> list[bool]:
        if keys:
            time.sleep(self.slow_s)
        return super().lookup(keys)


def over(store: DictStore, limit_s: float = 20.0, **settings: Any) -> Bench:
    link = Link(name="remote", store=store, where=Where.CONNECTOR, limit_s=limit_s)
    return Bench(host_bytes=1 << 18, links=[link], **settings)


def asked(bench: Bench) -> dict[str, float]:
    """Return how many objects were looked for, by where they were."""
    metrics = bench.engine.stats().tiers
    return {each.labels["tier"]: each.value for each in metrics if each.name == "kv_offload_tiering_block_queries"}


@pytest.mark.parametrize("name", ["full", "recurrent"])
def test_a_connector_is_waited_for_and_what_it_does_not_have_is_asked_for_once(name: str) -> None:
    store = SlowStore()
    prompt = [(i * 5 + 1) % VOCAB for i in range(21)]
    for cached in {}, {"connector": 20}:
        bench = over(store, state=STATES[name])
        bench.add("a", prompt, max_tokens=2)
        bench.run()
        assert bench.tokens("a") == answer(prompt, 2)
        first = bench.outputs["a"][0]
        assert first.cached_tokens == cached
        assert sum(first.missed_tokens.values()) == 21 - sum(cached.values())
        assert "failed" not in first.missed_tokens
        pages = 20 // PAGE_TOKENS
        if cached:
            counted = asked(bench)
            assert counted["connector"] >= pages
            assert sum(counted.values()) <= 2 * pages
        else:
            assert asked(bench) == {"none": pages}
            assert ("load", pages) not in store.calls
        bench.close()
    assert sum(count for call, count in store.calls if call == "load") <= 2 * pages


def test_what_failed_while_a_request_stood_further_back_is_told_as_such() -> None:
    store = DictStore()
    prompts = [[(i * n + 1) % VOCAB for i in range(21)] for n in (5, 7, 11)]
    for damaged in (False, True):
        bench = over(store, max_num_seqs=1)
        for name, prompt in zip("abc", prompts):
            bench.add(name, prompt, max_tokens=8)
        bench.run()
        for name, prompt in zip("abc", prompts):
            assert bench.tokens(name) == answer(prompt, 8)
            missed = bench.outputs[name][0].missed_tokens
            assert missed.get("failed", 0) == (20 if damaged else 0)
        bench.close()
        store.kept = {name: bytes(len(data)) for name, data in store.kept.items()}


def test_a_connector_that_does_not_say_what_it_has_costs_its_limit() -> None:
    store, gate = DictStore(), threading.Event()
    store.gates["lookup"] = gate
    bench = over(store, limit_s=0.2)
    prompt = [(i * 5 + 1) % VOCAB for i in range(21)]
    bench.add("a", prompt, max_tokens=2)
    begin = time.monotonic()
    bench.run()
    assert time.monotonic() - begin > 0.15
    assert bench.tokens("a") == answer(prompt, 2)
    assert "failed" not in bench.outputs["a"][0].missed_tokens
    gate.set()
    bench.close()


def test_another_salt_finds_nothing() -> None:
    bench = Bench(host_bytes=1 << 18)
    prompt = [(i * 5 + 1) % VOCAB for i in range(21)]
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        bench.add(name, prompt, salt=salt, max_tokens=2)
        bench.run()
        bench.engine._scheduler.memory.cache.tree.clear()
    assert [bench.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 0, 20]
    bench.close()


def test_a_stop_string_may_cut_a_request_whose_state_is_on_its_way_back() -> None:
    bench = Bench(host_bytes=1 << 18, overlap=False)
    bench.add("a", [3, 1, 4, 1, 5], max_tokens=40)
    while len(bench.outputs.get("a", [])) < 20:
        bench.step()
    scheduler, memory = bench.engine._scheduler, bench.engine._memory
    scheduler._preempt(scheduler.running[0])
    (sequence,) = scheduler.waiting
    while memory._sinker.busy:
        memory.poll()
    memory.cache.tree.clear()
    bench.step()
    assert sequence in memory._restorer._jobs
    bench.engine.abort(Abort(id="a", keep=2))
    bench.run()
    assert bench.reason("a") == "stop"
    bench.add("b", [3, 1, 4, 1, 5], max_tokens=9)
    bench.run()
    assert bench.tokens("b") == answer([3, 1, 4, 1, 5], 9)
    bench.close()


def test_what_fits_together_can_be_taken_wherever_it_lies() -> None:
    """Pages that are waited for may lie in the slab that a block needs."""
    rng, state, taken = random.Random(2), STATES["hybrid"], 0
    for _ in range(600):
        arena = make_arena(state, {0: rng.randint(5, 40), 1: rng.randint(2, 12), 2: rng.randint(2, 12), 3: 6})
        for pool in rng.sample(arena.pools, len(arena.pools)) * rng.randint(1, 3):
            held = pool.take(rng.randint(0, max(arena.available(pool.kind), 0)), "x")
            rng.shuffle(held)
            cut = rng.randint(0, len(held) // 2)
            pool.release(held[cut:])
            pool.pin(held[: rng.choice([0, cut // 2, cut])])
        items = [[b"key"] * rng.choice([0, 1, 1, 2]) for _ in arena.pools]
        job = _Job(array(TOKEN_TYPE), Node(b"", [], None), [], 1, [], items, [])
        if arena.can_take(job.need()):
            restorer = Restorer(arena, None, {}, None, None, state)  # type: ignore[arg-type]
            restorer._take(Sequence(REQUEST, order=0, max_tokens=1, seed=0, arrival_s=0.0), job)
            assert [len(handles) for handles in job.taken] == [*map(len, items)]
            taken += 1
    assert taken > 100
