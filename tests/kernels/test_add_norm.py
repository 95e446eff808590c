import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_an_add_and_a_norm(dtype: torch.dtype):
    a, b, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 64), (5, 64), (64,), (64,)))
    total, normed = torch.ops.treadle.add_norm(a, b, weight, bias, 0.5, 2.0, "rms", 1e-2, True, 4, "before")
    expected = torch.ops.treadle.add(a, b, 0.5, 2.0)
    assert torch.equal(total, expected)
    assert torch.equal(normed, torch.ops.treadle.norm(expected, weight, bias, "rms", 1e-2, True, 4, "before"))
