"""q_temperature: queries that grow with their position, so that attention over a long context stays sharp (Llama 4).

out[t] = q[t] * (1 + beta * log(1 + floor((positions[t] + shift) / length)))
smooth: q[t] * (1 + beta * log(max(1, (positions[t] + shift) / length)))          (Inkling)
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def q_temperature(
    q: Tensor, positions: Tensor, beta: float, length: int, shift: int = 0, smooth: bool = False
) -> Tensor:
    """Return the scaled queries, in their dtype. Shapes: q [T, H, D]; positions [T] int64, negative as 0."""
    spans = (positions.clamp(min=0).float() + shift) / length
    factor = 1 + beta * (spans.clamp(min=1).log() if smooth else torch.log1p(torch.floor(spans)))
    return q * factor.to(q.dtype).view(-1, 1, 1)


register_reference("q_temperature", q_temperature, inline=True)
