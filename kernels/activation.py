"""activation, act_mul, gated_activation: pointwise functions of an MLP.

    activation        act(x)
    act_mul           act(gate) * up
    gated_activation  act(x[..., :n]) * x[..., n:], n = half of the last dim

Names are those of config.json (transformers: ACT2FN). The spellings of the tanh approximation of GELU are one function.
In a low precision act(gate) is rounded before the product.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _identity(x: Tensor) -> Tensor:
    return x.clone()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "linear": _identity,
    "none": _identity,
}


class UnknownActivationError(ValueError):
    """An activation that no kernel knows; names the nearest that exists."""


def activation(x: Tensor, act: str) -> Tensor:
    """Return ``act(x)``. Raises: UnknownActivationError."""
    function = ACTIVATIONS.get(act)
    if function is None:
        nearest = difflib.get_close_matches(act, ACTIVATIONS, n=1, cutoff=0.0)[0]
        raise UnknownActivationError(f"no activation {act!r}; the nearest is {nearest!r}")
    return function(x)


def act_mul(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return ``act(gate) * up``. Raises: UnknownActivationError."""
    return activation(gate, act) * up


def gated_activation(x: Tensor, act: str) -> Tensor:
    """Return ``act(first half) * second half`` of the last dim. Raises: UnknownActivationError."""
    gate, up = x.chunk(2, -1)
    return activation(gate, act) * up


register_reference("activation", activation, inline=True)
register_reference("act_mul", act_mul, inline=True)
register_reference("gated_activation", gated_activation, inline=True)
register_triton("activation", "activation_triton", skinny("x"))
register_triton("act_mul", "activation_triton", skinny("gate", "up"))
register_triton("gated_activation", "activation_triton", skinny("x"))
