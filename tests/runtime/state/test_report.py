from __future__ import annotations

import pytest
from history_model import HYBRID, STATES, VOCAB, Bench

from treadle.runtime.request import Abort


@pytest.mark.parametrize("name", sorted(STATES))
def test_what_requests_held_is_free_or_kept_for_others_after_mixed_load_with_aborts(name: str) -> None:
    """Every byte is somewhere, and none is held by who has gone."""
    bench = Bench(state=STATES[name], planned_bytes={"full": 5})
    start = bench.engine.stats()
    assert set(start.state_kinds) == {pool.name for pool in bench.arena.pools}
    assert start.state_kinds["full"].planned_bytes == 5
    assert all(kind.used_bytes == kind.cached_bytes == 0 for kind in start.state_kinds.values())
    held = 0
    for n in range(12):
        bench.add(f"r{n}", [(n * 3 + i) % VOCAB for i in range(5 + n)], max_tokens=12)
        bench.step()
        held = max(held, sum(kind.used_bytes for kind in bench.engine.stats().state_kinds.values()))
        if n % 3 == 0:
            bench.engine.abort(Abort(id=f"r{n}"))
    bench.run()
    end = bench.engine.stats()
    assert held > 0
    assert all(kind.used_bytes == 0 for kind in end.state_kinds.values())
    assert sum(kind.cached_bytes for kind in end.state_kinds.values()) > 0
    assert end.arena_bytes == start.arena_bytes
    if name == "full":
        kind = end.state_kinds["full"]
        assert kind.cached_bytes + kind.available_bytes == start.state_kinds["full"].available_bytes
    bench.close()


def test_checkpoints_and_tiers_are_counted() -> None:
    bench = Bench(state=HYBRID, host_bytes=1 << 16)
    bench.add("a", [1] * 9, max_tokens=4)
    bench.run()
    stats = bench.engine.stats()
    assert stats.checkpoints >= 1
    assert 0 < stats.checkpoint_bytes <= sum(kind.cached_bytes for kind in stats.state_kinds.values())
    numbers = {metric.name: metric.value for metric in stats.tiers if metric.labels in ({}, {"tier": "host"})}
    assert numbers["kv_offload_cpu_allocation_size"] == 1 << 16
    assert numbers["kv_offload_store_bytes"] > 0
    assert {metric.kind for metric in stats.tiers} == {"counter", "gauge"}
    assert Bench().engine.stats().tiers == []
    bench.close()
