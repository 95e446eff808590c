from __future__ import annotations

import pytest
from arenas import make_arena
from history_model import HYBRID

from treadle.runtime.state.arena import Arena
from treadle.runtime.state.node import Node
from treadle.runtime.state.snapshots import NEVER, Snapshot, Snapshots

NODE_KEY = b"node"


@pytest.fixture
def arena() -> Arena:
    return make_arena(HYBRID, dict.fromkeys(range(4), 8))


def snapshots_in(arena: Arena, budget: int | None = None) -> tuple[Snapshots, Node]:
    return Snapshots(arena.pools, [pool.item_bytes for pool in arena.pools], budget), Node(NODE_KEY, [], None)


def make(arena: Arena, position: int, tail: bytes = b"") -> Snapshot:
    items = [tuple(pool.take(1 if pool.kind or tail else 0, "test")) for pool in arena.pools]
    return Snapshot(position, tail, tuple(items), NEVER)


def test_the_least_recently_used_goes_first(arena: Arena) -> None:
    snapshots, node = snapshots_in(arena)
    first, second, third = (make(arena, position) for position in (4, 8, 12))
    for tick, each in enumerate((first, second, third)):
        snapshots.add(node, each, tick)
    snapshots.touch(first, 3)
    assert snapshots.oldest is second
    snapshots.demote(third)
    assert (snapshots.oldest, third.used) == (third, NEVER)
    snapshots.lock(third)
    assert snapshots.oldest is second
    snapshots.drop(second)
    assert node.snapshots == [first, third]
    snapshots.unlock(third)
    assert len(snapshots) == 2


def test_items_go_with_their_snapshot_or_to_who_takes_it(arena: Arena) -> None:
    snapshots, node = snapshots_in(arena)
    snapshot, taken = make(arena, 4), make(arena, 6, b"tail")
    for each in (snapshot, taken):
        snapshots.add(node, each, 0)
    assert snapshots.num_bytes == snapshots.bytes_of(snapshot) + snapshots.bytes_of(taken)
    assert snapshots.loose_pages == 1
    snapshots.lock(taken)
    assert snapshots.loose_pages == 0
    snapshots.remove(taken)
    snapshots.drop(snapshot)
    assert (snapshots.num_bytes, len(snapshots)) == (0, 0)
    assert [pool.used for pool in arena.pools] == [1, 1, 1, 1]


def test_a_budget_counts_all_that_snapshots_hold(arena: Arena) -> None:
    snapshot = make(arena, 4)
    snapshots, node = snapshots_in(arena, budget=sum(pool.item_bytes for pool in arena.pools[1:]))
    assert not snapshots.over_budget(1)
    snapshots.add(node, snapshot, 0)
    assert not snapshots.over_budget(0)
    assert snapshots.over_budget(1)
