import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_norm_a_product_and_an_activation(dtype: torch.dtype):
    x, norm_weight, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 32), (32,), (12, 32), (12,)))
    how = ("rms", 1e-3, True, 2, "before")
    ours = torch.ops.treadle.norm_gated_linear(x, norm_weight, None, *how, weight, bias, "gelu")
    h = torch.ops.treadle.norm(x, norm_weight, None, *how)
    assert torch.equal(ours, torch.ops.treadle.gated_activation(torch.ops.treadle.linear(h, weight, bias), "gelu"))
