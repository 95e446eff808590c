"""glu: the gated activations that have limits or parameters, as experts have them (``kernels.experts``)."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.experts import expert_activation
from treadle.kernels.registry import register_reference


def glu(
    gate: Tensor, up: Tensor, act: str, limit: float = 0.0, alpha: float = 1.702, beta: float = 0.0,
    linear_beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the hidden channels. Shapes: all [T, F]. Raises: UnknownActivationError."""
    return expert_activation(torch.cat([gate, up], -1), act, True, limit, alpha, beta, linear_beta)


register_reference("glu", glu, inline=True)
