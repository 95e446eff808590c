"""How a step of attention is cut: splits within their workspace, and the steps that go to the kernel for Hopper."""

from __future__ import annotations

import pytest

from treadle.graph.workspace import PARTIAL_BYTES
from treadle.kernels.paged_attention_tiles import PrefillTiles, Shape, for_hopper, plan_walk, prefill_tiles

HOPPER = (9, 0)


def shape(tokens: int, sequences: int = 1, heads: int = 32, kv_heads: int = 8, dim: int = 128, **other: int) -> Shape:
    sizes = {"k_dim": dim, "v_dim": dim, "item_bytes": 2, "processors": 132, **other}
    return Shape(tokens=tokens, sequences=sequences, heads=heads, kv_heads=kv_heads, **sizes)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (16, 16), (71, 1)])
@pytest.mark.parametrize("sequences", [1, 16, 512])
@pytest.mark.parametrize("tokens", [16, 128, 512, 1024])
def test_workspace_fits_what_was_planned(tokens: int, sequences: int, heads: tuple[int, int], dim: int) -> None:
    step = shape(tokens, sequences, *heads, dim)
    tiles = prefill_tiles(step)
    for waves in (1, 4, 64):
        changed = PrefillTiles(**{**vars(tiles), "waves": waves})
        assert plan_walk(step, changed, 1 << 20).splits * tiles.rows * (dim + 2) * 4 <= PARTIAL_BYTES


def test_large_steps_and_short_contexts_are_not_split() -> None:
    for tokens, reach, split in ((128, 1 << 16, True), (128, 512, False), (8192, 1 << 16, False)):
        step = shape(tokens)
        assert (plan_walk(step, prefill_tiles(step), reach).splits > 0) == split


def test_it_takes_steps_with_work_for_every_processor() -> None:
    assert for_hopper(shape(8192), 16, HOPPER)
    assert for_hopper(shape(512), 16, HOPPER)
    assert for_hopper(shape(8192, sequences=256), 16, HOPPER)
    assert not for_hopper(shape(128), 16, HOPPER)
    assert not for_hopper(shape(512, heads=16), 16, HOPPER)
    assert not for_hopper(shape(512, sequences=256), 16, HOPPER)


def test_it_leaves_what_it_is_not_written_for() -> None:
    assert not for_hopper(shape(8192), 16, (10, 0))
    assert not for_hopper(shape(8192), 16, (0, 0))
    assert not for_hopper(shape(8192), 12, HOPPER)
    assert not for_hopper(shape(8192, dim=256), 16, HOPPER)
    assert not for_hopper(shape(8192, v_dim=64), 16, HOPPER)
    assert not for_hopper(shape(8192, item_bytes=4), 16, HOPPER)
    assert not for_hopper(shape(8192, heads=160, kv_heads=1), 16, HOPPER)
