import pytest
import torch

from treadle.kernels.linear_int8 import dequantize_int8, quantize_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_embedding_of_the_dequantised_table(dtype: torch.dtype):
    codes, scale = quantize_int8(torch.randn(20, 24), 8)
    table = dequantize_int8(codes, scale, 8).to(dtype)
    ids = torch.tensor([3, 19, 0, 3])
    for factor in (1.0, 640**0.5):
        expected = torch.ops.treadle.embed(ids, table, factor)
        assert torch.equal(torch.ops.treadle.embed_int8(ids, codes, scale, dtype, 8, factor), expected)


def test_no_tokens():
    codes, scale = quantize_int8(torch.randn(20, 24), 8)
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.ops.treadle.embed_int8(none, codes, scale, torch.float32, 8).shape == (0, 24)
