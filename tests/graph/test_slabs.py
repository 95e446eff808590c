"""How arenas are cut: what is lost is small, and what is promised fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.graph.slabs import cut_arena, least_bytes, slab_bytes

GIB, MIB = 1 << 30, 1 << 20
HYBRIDS = {
    "pages of one attention layer in four and blocks of 75 MiB": ((393216, 75 * MIB + 6912), 60 * GIB),
    "10 full and 52 windowed layers": ((10 * 131072, 52 * 131072), 40 * GIB),
    "full, windows and blocks": ((6 * 16384, 18 * 16384, 19 * MIB + 256), 20 * GIB),
    "no layer appends": ((256, 50 * MIB), 8 * GIB),
    "a small machine": ((3 * 16384, 5 * MIB), GIB),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_little_is_lost(name: str) -> None:
    items, num_bytes = HYBRIDS[name]
    cut = cut_arena(items, num_bytes)
    left_over = max(cut.slab_bytes % item for item in items) * cut.num_slabs
    assert left_over + cut.tail_bytes % items[cut.tail_kind] < 0.01 * num_bytes
    assert cut.slab_bytes <= max(0.015 * num_bytes, max(items))
    assert cut.num_slabs <= 1024


@given(
    items=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    units=st.integers(1, 200_000),
)
def test_the_parts_are_the_whole(items: list[int], units: int) -> None:
    item_bytes, num_bytes = [item * 256 for item in items], units * 256
    cut = cut_arena(item_bytes, num_bytes)
    parts = cut.scratch_bytes + cut.num_slabs * cut.slab_bytes + cut.tail_bytes
    assert parts == max(num_bytes, cut.scratch_bytes)
    assert cut.slab_bytes % max(item_bytes) == 0
    assert cut.tail_bytes < cut.slab_bytes
    if len(items) == 1:
        assert cut.most(0) == max(0, num_bytes // item_bytes[0] - 1), "one kind loses nothing"


@given(
    items=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 300)), min_size=1, max_size=4),
)
def test_least_bytes_hold_what_was_asked(items: list[tuple[int, int]]) -> None:
    item_bytes, counts = [item * 256 for item, _ in items], [count for _, count in items]
    least = least_bytes(item_bytes, counts)
    assert cut_arena(item_bytes, least).holds(counts)
    bare = max(item_bytes) + sum(item * count for item, count in zip(item_bytes, counts))
    assert least == bare if len(items) == 1 else bare <= least


def test_needed_slabs_fill_the_tail_first() -> None:
    cut = cut_arena((512, 3072), 3072 * 5 + 1024)
    assert (cut.tail_kind, cut.tail_items(0), cut.tail_items(1)) == (0, 2, 0)
    assert [cut.needed(0, count) for count in (0, 2, 3, 8, 9)] == [0, 0, 1, 1, 2]
    assert cut.holds((2 + 6, 3))
    assert not cut.holds((2 + 6 + 1, 3))


def test_a_slab_is_no_less_than_an_item() -> None:
    assert slab_bytes((256, 5 * MIB), MIB) == 5 * MIB
