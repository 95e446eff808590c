from __future__ import annotations

import pytest

from treadle.graph.state import LayerKV, PagedKV
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import Arena, ArenaError, arena_bytes

KV = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=8, v_dim=8),), dtype="bfloat16", page_tokens=16)


def test_slabs_follow_the_scratch_page_without_overlap() -> None:
    arena = Arena(CpuBackend(threads=1), arena_bytes(KV, 10), scratch_bytes=KV.page_bytes)
    assert arena.free_bytes == 10 * KV.page_bytes
    first, second = arena.take(4 * KV.page_bytes), arena.take(6 * KV.page_bytes)
    assert first.offset == KV.page_units
    assert second.offset == first.offset + first.num_units
    assert (second.offset + second.num_units) * 256 == arena.bytes.numel()
    assert arena.free_bytes == 0
    with pytest.raises(ArenaError, match="0 of the arena are left"):
        arena.take(1)


def test_an_arena_is_zeroed() -> None:
    arena = Arena(CpuBackend(threads=1), arena_bytes(KV, 3), scratch_bytes=KV.page_bytes)
    assert int(arena.bytes.sum()) == 0


def test_an_arena_below_its_scratch_page_is_refused() -> None:
    with pytest.raises(ArenaError, match=f"it needs {KV.page_bytes}"):
        Arena(CpuBackend(threads=1), 100, scratch_bytes=KV.page_bytes)
