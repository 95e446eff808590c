"""What state memory says of itself to monitoring: bytes by kind, checkpoints, transfers and tiers."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.runtime.request import KindStats, Metric, Stats
from treadle.runtime.state.memory import StateMemory


def report(stats: Stats, memory: StateMemory, planned: Mapping[str, int]) -> None:
    """Write into ``stats`` where the bytes of ``memory`` are; ``planned`` are those of the memory plan by kind."""
    accounts = memory.accounts
    stats.prefix_missed_tokens, stats.recomputed_tokens = accounts.misses.tokens, accounts.recomputed
    stats.preempted = accounts.preempted
    stats.external_query_tokens, stats.external_hit_tokens = accounts.external_queries, accounts.external_hits
    usage = memory.arena.usage()
    stats.arena_bytes = usage.used_bytes + usage.unused_bytes
    stats.free_slab_bytes = usage.free_slab_bytes
    stats.stranded_bytes = usage.stranded_bytes
    stats.evacuated_bytes = usage.evacuated_bytes
    stats.fragmentation = usage.fragmentation
    stats.state_kinds = {}
    for kind, pool in zip(usage.kinds, memory.arena.pools):
        cached = memory.cache.room.evictable(pool.kind) * pool.item_bytes
        stats.state_kinds[kind.name] = KindStats(
            item_bytes=pool.item_bytes,
            planned_bytes=planned.get(kind.name, 0),
            used_bytes=kind.used_bytes - cached,
            cached_bytes=cached,
            free_bytes=kind.free_bytes,
            available_bytes=kind.available_bytes,
        )
    snapshots = memory.cache.snapshots
    stats.checkpoints, stats.checkpoint_bytes = len(snapshots), snapshots.num_bytes
    sessions = memory.sessions
    stats.sessions_pinned, stats.pinned_bytes = len(sessions), sessions.pinned_bytes
    stats.session_hints = sessions.followed
    if memory.tiers is not None:
        stats.tiers = [
            Metric(each.name, each.doc, "counter" if each.kind == "counter" else "gauge", each.value, dict(each.labels))
            for each in memory.tiers.stats().metrics()
        ]
