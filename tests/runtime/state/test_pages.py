from __future__ import annotations

import pytest

from treadle.graph.state import LayerKV, PagedKV
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import ArenaError
from treadle.runtime.state.pages import PageAllocator, PageArena, Slab, arena_bytes

KV = PagedKV(name="full", layers=(LayerKV(kv_heads=2, k_dim=8, v_dim=8),) * 3, dtype="float32", page_tokens=4)


def make(num_pages: int) -> PageAllocator:
    return PageAllocator(Slab(offset=100, num_units=num_pages * KV.page_units + KV.page_units - 1), KV)


def test_handles_are_disjoint_offsets_inside_the_slab() -> None:
    allocator = make(5)
    pages = allocator.take(5, "a")
    assert KV.page_units == 6
    assert sorted(pages) == [100, 106, 112, 118, 124]
    assert allocator.free == 0
    assert allocator.total == 5


def test_a_shared_page_is_free_after_its_last_release() -> None:
    allocator = make(2)
    pages = allocator.take(1, "a")
    allocator.share(pages)
    allocator.release(pages)
    assert (allocator.free, allocator.refs(pages[0]), allocator.num_refs) == (1, 1, 1)
    allocator.release(pages)
    assert (allocator.free, allocator.num_refs) == (2, 0)


def test_misuse_is_caught() -> None:
    allocator = make(2)
    pages = allocator.take(1, "a")
    with pytest.raises(AssertionError, match="b takes 2 pages of 1 free"):
        allocator.take(2, "b")
    allocator.release(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(pages)
    with pytest.raises(AssertionError, match="nobody holds"):
        allocator.share(pages)


def test_reclaim_names_who_took_what_is_not_accounted_for() -> None:
    allocator = make(6)
    kept = allocator.take(2, "a")
    allocator.take(3, "b")
    allocator.share(kept)
    assert allocator.reclaim(kept) == {"a": 2, "b": 3}
    assert (allocator.free, allocator.num_refs) == (4, 2)
    allocator.release(kept)
    assert sorted(allocator.take(6, "c")) == [100, 106, 112, 118, 124, 130]


FULL = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=8, v_dim=8),), dtype="bfloat16", page_tokens=16)


def test_slabs_follow_the_scratch_page_without_overlap() -> None:
    arena = PageArena(CpuBackend(threads=1), arena_bytes(FULL, 10), scratch_bytes=FULL.page_bytes)
    assert arena.free_bytes == 10 * FULL.page_bytes
    first, second = arena.take(4 * FULL.page_bytes), arena.take(6 * FULL.page_bytes)
    assert first.offset == FULL.page_units
    assert second.offset == first.offset + first.num_units
    assert (second.offset + second.num_units) * 256 == arena.bytes.numel()
    assert arena.free_bytes == 0
    with pytest.raises(ArenaError, match="0 of the arena are left"):
        arena.take(1)


def test_an_arena_is_zeroed() -> None:
    arena = PageArena(CpuBackend(threads=1), arena_bytes(FULL, 3), scratch_bytes=FULL.page_bytes)
    assert int(arena.bytes.sum()) == 0


def test_an_arena_below_its_scratch_page_is_refused() -> None:
    with pytest.raises(ArenaError, match=f"it needs {FULL.page_bytes}"):
        PageArena(CpuBackend(threads=1), 100, scratch_bytes=FULL.page_bytes)
