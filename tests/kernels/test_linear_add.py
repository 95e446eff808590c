import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_product_and_an_add(dtype: torch.dtype):
    x, weight, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((5, 32), (8, 32), (8,), (5, 8)))
    ours = torch.ops.treadle.linear_add(x, weight, bias, residual, 0.5, 2.0)
    product = torch.ops.treadle.linear(x, weight, bias)
    assert torch.equal(ours, torch.ops.treadle.add(residual, product, 0.5, 2.0))
