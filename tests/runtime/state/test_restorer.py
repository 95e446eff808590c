"""What comes back from tiers, and what happens if it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from history_model import STATES, VOCAB, Bench, answer

from treadle.runtime.state.tiers.ticket import Object, Ticket


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


@pytest.mark.parametrize("lost", ["all", "first", "last"])
@pytest.mark.parametrize("name", sorted(STATES))
def test_a_load_that_fails_is_a_miss(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    fetch = tiers.fetch
    fetched = []

    def failing(objects: Sequence[Object]) -> Ticket:
        ticket = fetch(objects)
        settle = ticket.settle
        bad = {"all": range(len(objects)), "first": [0], "last": [len(objects) - 1]}[lost]
        monkeypatch.setattr(ticket, "settle", lambda index, ok: settle(index, ok and index not in bad))
        for index in bad:
            ticket.ok[index] = False
        fetched.append(len(objects))
        return ticket

    monkeypatch.setattr(tiers, "fetch", failing)
    cached = conversation(bench, 3)
    assert len(fetched) == 2
    assert cached[1] < 24
    assert cached[2] < 32
    assert bench.engine.stats().prefix_missed_tokens["failed"] == bench.engine._memory._restorer.failed_tokens > 0
    assert bench.engine._scheduler.heal() == {}
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
