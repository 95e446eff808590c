from typing import get_args

import pytest
import torch
from transformers.activations import ACT2FN

from treadle.graph.primitives import Activation
from treadle.kernels.activation import ACTIVATIONS, UnknownActivationError

SHARED = sorted(ACTIVATIONS.keys() & ACT2FN.keys())


@pytest.mark.parametrize("act", SHARED)
def test_it_is_the_function_of_that_name(act: str):
    x = torch.linspace(-12, 12, 1001)
    torch.testing.assert_close(torch.ops.treadle.activation(x, act), ACT2FN[act](x), atol=2e-6, rtol=1e-5)


def test_descriptions_may_name_what_is_there():
    assert set(get_args(Activation)) == ACTIVATIONS.keys()


def test_the_names_that_models_use_are_there():
    wanted = {"silu", "gelu", "gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast", "relu", "relu2"}
    assert wanted | {"sigmoid", "tanh", "softplus", "none"} <= ACTIVATIONS.keys()
    x = torch.randn(9)
    torch.testing.assert_close(torch.ops.treadle.activation(x, "softplus"), torch.log1p(x.exp()))
    torch.testing.assert_close(torch.ops.treadle.activation(x, "gelu_tanh"), ACT2FN["gelu_pytorch_tanh"](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_forms_agree(dtype: torch.dtype):
    gate, up = torch.randn(5, 33).to(dtype), torch.randn(5, 33).to(dtype)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(torch.ops.treadle.act_mul(gate, up, "silu"), expected)
    torch.testing.assert_close(torch.ops.treadle.gated_activation(torch.cat([gate, up], -1), "silu"), expected)


def test_a_result_is_never_its_input():
    x = torch.randn(4)
    assert torch.ops.treadle.activation(x, "none").data_ptr() != x.data_ptr()


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(UnknownActivationError, match="'gelu_new'"):
        torch.ops.treadle.activation(torch.randn(2), "gelu_now")
