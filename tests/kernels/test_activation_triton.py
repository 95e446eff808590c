"""The Triton kernels of activation, act_mul and gated_activation against the references."""

import pytest
import torch
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import activation_triton
from treadle.kernels.activation import ACTIVATIONS, activation, gated_activation

# Triton's interpreter cuts bf16 off instead of rounding it
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# a sigmoid's exponential may be infinite, and the interpreter's numpy says so
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_it_is_the_function_of_that_name(device: str, act: str, dtype: torch.dtype):
    x = torch.linspace(-12, 12, 1001).to(dtype)
    ours = activation_triton.activation(x.to(device), act).cpu()
    torch.testing.assert_close(ours, activation(x, act), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (5, 66), (2, 3, 64), (3, 2500), (0, 8)])
def test_the_gated_forms(device: str, dtype: torch.dtype, shape: tuple[int, ...]):
    x = torch.randn(shape).to(dtype)
    expected = gated_activation(x, "silu")
    gate, up = x.to(device).chunk(2, -1)
    for ours in (activation_triton.gated_activation(x.to(device), "silu"), activation_triton.act_mul(gate, up, "silu")):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_not_finite_stay_so(device: str):
    x = torch.tensor([float("nan"), float("inf")], device=device)
    for act in ("silu", "gelu", "relu", "relu2", "linear"):
        y = activation_triton.activation(x, act).cpu()
        assert y[0].isnan()
        assert y[1].isposinf()


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels import activation_triton
for act in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "softplus", "none"):
    activation_triton.gated_activation(torch.zeros(8, 6144, dtype=torch.bfloat16), act, pdl=True)
activation_triton.activation(torch.zeros(8, 6144), "gelu")
""")
    assert len(compiled) == 11
