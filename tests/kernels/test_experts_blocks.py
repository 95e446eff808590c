"""How the products of experts are cut: every table entry belongs to a class, and the rule covers every shape."""

import pytest
import torch

from treadle.graph.expert_rows import LEAST_ROWS
from treadle.kernels.experts_blocks import MEASURED, Blocks, choose, general, shape_class


def test_what_was_measured_is_taken_for_its_class_and_16_bits():
    for key, blocks in MEASURED.items():
        hidden, inner, number, top_k, tokens = key
        shape = (1 << hidden, 1 << inner, number, top_k, tokens)
        assert shape_class(*shape) == key
        assert choose(*shape, torch.bfloat16) == blocks
        assert choose(*shape, torch.float32) == general(*shape, torch.float32)


def test_a_class_holds_what_is_as_large():
    assert shape_class(2048, 768, 128, 8, 5) == shape_class(1025, 1024, 128, 8, 8) == (11, 10, 128, 8, 8)
    assert shape_class(2048, 768, 128, 8, 0) == (11, 10, 128, 8, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2048, 768, 128, 8), (4096, 14336, 8, 2), (5120, 8192, 16, 1), (20, 6, 3, 3)])
def test_the_rule_covers_every_number_of_tokens(shape: tuple[int, int, int, int], dtype: torch.dtype):
    found = {tokens: general(*shape, tokens, dtype) for tokens in (1, 2, 8, 32, 128, 1000, 8192, 65536)}
    assert found[1].way == "vector"
    assert found[8192].way == "ordered"
    for blocks in found.values():
        check(blocks, dtype)


def check(blocks: Blocks, dtype: torch.dtype) -> None:
    for tile in (blocks.first, blocks.second):
        assert all(size & (size - 1) == 0 for size in (tile.outputs, tile.inputs, tile.warps))
        assert tile.inputs >= 16
    if blocks.way != "vector":
        assert blocks.rows >= LEAST_ROWS
    if dtype == torch.float32 and blocks.way != "vector":
        # accumulators of products without matrix units are held in registers
        assert blocks.rows * blocks.first.outputs <= 2048
