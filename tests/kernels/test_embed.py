import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.kernels.embed import round_scalar

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.floats(-60000, 60000), st.sampled_from(DTYPES))
def test_a_rounded_scalar_is_what_a_tensor_holds(value: float, dtype: torch.dtype):
    assert round_scalar(value, dtype) == torch.tensor(value, dtype=torch.float64).float().to(dtype).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_times_the_rounded_scale(dtype: torch.dtype):
    weight = torch.randn(20, 7).to(dtype)
    ids = torch.tensor([3, 19, 0, 3])
    # The hidden size of Gemma 3 270M, whose root no low precision holds exactly.
    scale = 640**0.5
    expected = weight[ids] * torch.tensor(scale).to(dtype)
    assert torch.equal(torch.ops.treadle.embed(ids, weight, scale), expected)
    assert torch.equal(torch.ops.treadle.embed(ids, weight), weight[ids])


def test_no_tokens():
    assert torch.ops.treadle.embed(torch.zeros(0, dtype=torch.int64), torch.randn(4, 6)).shape == (0, 6)
