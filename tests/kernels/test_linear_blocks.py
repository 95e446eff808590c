import pytest
import torch

from treadle.kernels.linear_blocks import LONGEST_HELD, MEASURED, choose, general, shape_class

OPS = ("linear", "linear_add", "norm_gated_linear")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_exist_for_every_shape(op: str, tokens: int, dtype: torch.dtype):
    for width in (1, 63, 1024, 3072, 14336, 100_000):
        for outputs in (1, 1000, 4096, 151_936):
            blocks = choose(op, outputs, width, tokens, dtype)
            assert blocks.rows & (blocks.rows - 1) == blocks.columns & (blocks.columns - 1) == 0
            assert blocks.way != "held" or width <= blocks.columns <= LONGEST_HELD
            assert blocks.way != "dot" or (min(blocks.rows, blocks.columns) >= 16 and dtype != torch.float32)


def test_what_was_measured_serves_its_class_where_it_can():
    for (op, n, k, t), blocks in MEASURED.items():
        assert shape_class(1 << n, 1 << k, t) == (n, k, t)
        assert choose(op, 1 << n, 1 << k, t, torch.bfloat16) == blocks
        assert choose(op, 1 << n, 1 << k, t, torch.float32) == general(op, 1 << k, t, torch.float32)


def test_classes():
    assert [shape_class(n, 1, 1)[0] for n in (1, 2, 3, 1023, 1024)] == [0, 1, 1, 9, 10]
    assert [shape_class(1, k, 1)[1] for k in (1, 2, 3, 1024, 1025)] == [0, 1, 2, 10, 11]
    assert [shape_class(1, 1, t)[2] for t in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
