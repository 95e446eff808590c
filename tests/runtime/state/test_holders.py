from __future__ import annotations

from arenas import make_arena
from history_model import STATE

from treadle.runtime.state.holders import Holders


def test_what_only_the_tree_holds_can_be_evicted() -> None:
    pool = make_arena(STATE, {0: 8}).pool(0)
    holders = Holders(pool)
    kept = pool.take(2, "tree")
    own = holders.take(3, "a")
    holders.share([*kept, own[0]])
    assert (pool.used, holders.num_held, holders.evictable) == (5, 5, 0)
    holders.release(kept)
    assert (holders.num_held, holders.evictable) == (3, 2)
    holders.release(own)
    # One has another user.
    assert (pool.used, holders.num_held, holders.evictable) == (3, 1, 2)
    holders.let_go(own[:1])
    assert (pool.used, holders.evictable) == (3, 3)
    holders.hold(kept)
    holders.clear()
    assert holders.evictable == 3
