"""xielu: an activation with learned slopes (Huang and Schlag, https://arxiv.org/abs/2411.13010).

p = softplus(alpha_p);  n = beta + softplus(alpha_n)
x > 0     p x^2 + beta x
x <= 0    n (exp(min(x, eps)) - 1 - x) + beta x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return the activation of ``x``, in its dtype. Shapes: x [..., C]; the parameters have one element each."""
    alpha_p, alpha_n, beta, eps = (value.reshape(()) for value in (alpha_p, alpha_n, beta, eps))
    rising, falling = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * falling + beta * x
    return torch.where(x > 0, rising * x * x + beta * x, below)


register_reference("xielu", xielu, inline=True)
