"""Items by their handles: references, pins, owners, and leaks that are named."""

from __future__ import annotations

import pytest

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import Arena, Kind
from treadle.runtime.state.pool import Pool


def make(num_items: int, item_bytes: int = 512) -> Pool:
    kinds = (Kind("full", item_bytes),)
    return Arena(CpuBackend(threads=1), (1 + num_items) * item_bytes, kinds, scratch_bytes=item_bytes).pool(0)


def test_a_shared_item_is_free_after_its_last_release() -> None:
    pool = make(2)
    items = pool.take(1, "a")
    pool.share(items)
    pool.release(items)
    assert (pool.used, pool.refs(items[0]), pool.num_refs) == (1, 1, 1)
    pool.release(items)
    assert (pool.used, pool.num_refs) == (0, 0)


def test_handles_are_disjoint_and_stay_small() -> None:
    pool = make(5)
    for _ in range(10):
        items = pool.take(5, "a")
        assert sorted(pool.offsets(items)) == [2, 4, 6, 8, 10]
        assert max(items) < 5
        pool.release(items)


def test_what_was_given_back_last_is_given_out_first() -> None:
    pool = make(1000)
    items = pool.take(100, "a")
    at = pool.offset(items[50])
    pool.release([items[50]])
    assert pool.offset(pool.take(1, "b")[0]) == at


def test_misuse_is_caught() -> None:
    pool = make(2)
    items = pool.take(1, "a")
    with pytest.raises(AssertionError, match="b takes 2 items of 1 free"):
        pool.take(2, "b")
    pool.release(items)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(items)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.share(items)
    with pytest.raises(AssertionError, match="pinned but nobody holds"):
        pool.pin(items)
    with pytest.raises(AssertionError, match="not pinned"):
        pool.unpin(items)


def test_a_pinned_item_is_not_free_before_it_is_unpinned() -> None:
    pool = make(1)
    items = pool.take(1, "a")
    pool.pin(items)
    pool.pin(items)
    pool.release(items)
    assert (pool.used, pool.num_refs) == (1, 0)
    pool.unpin(items)
    assert pool.used == 1
    pool.unpin(items)
    assert pool.used == 0
    assert pool.take(1, "b")


def test_reclaim_names_who_took_what_is_not_accounted_for() -> None:
    pool = make(6)
    kept = pool.take(2, "a")
    leaked = pool.take(3, "b")
    pool.share(kept)
    pool.pin(leaked[:1])
    assert pool.reclaim(kept) == {"a": 2, "b": 3}
    assert (pool.used, pool.num_refs) == (3, 2), "what is pinned is kept until it is unpinned"
    pool.unpin(leaked[:1])
    pool.release(kept)
    assert sorted(pool.offsets(pool.take(6, "c"))) == [2, 4, 6, 8, 10, 12]
    assert pool.owner(0) == "c"


def test_a_pool_of_millions_makes_nothing_up_front() -> None:
    arena = Arena(CpuBackend(threads=1), 1 << 28, (Kind("full", 256), Kind("block", 1 << 22)), scratch_bytes=1 << 22)
    pool = arena.pool(0)
    assert arena.available(0) > 1_000_000
    items = pool.take(10, "a")
    assert len(pool.offsets(items)) == 10
    assert len(list(pool.held())) == 10
    assert max(items) < 100
