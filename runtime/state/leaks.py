"""Items of the arena that somebody forgot to give back."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.runtime.state.arena import Arena
from treadle.runtime.state.cache import PrefixCache
from treadle.runtime.state.holders import Holders


def reclaim(arena: Arena, cache: PrefixCache, holders: Mapping[int, Holders]) -> dict[str, int]:
    """Give back all but the prefix tree's own references, under no lock, while no sequence runs and nothing is pinned;
    return who had taken how many items."""
    leaked: dict[str, int] = {}
    tree, snapshots, pages = cache.tree, cache.snapshots, arena.pool(0)
    if tree.evictable != tree.num_pages:
        for page in tree.force_unlock():
            leaked[pages.owner(page)] = leaked.get(pages.owner(page), 0) + 1
    snapshots.force_unlock()
    for pool in arena.pools:
        held = list(snapshots.items(pool.kind))
        if pool.kind != 0:
            holders[pool.kind].clear()
        if pool.num_refs != len(held) + (tree.num_pages if pool.kind == 0 else 0):
            held += tree.pages() if pool.kind == 0 else ()
            for owner, count in pool.reclaim(held).items():
                leaked[owner] = leaked.get(owner, 0) + count
    return leaked
