"""affine: clip, scale and soft cap.

    x = clamp(x, -clip, clip)                 (clip 0: off; OLMo's and DBRX's qkv clipping)
    x = x * scale                             (embedding, residual and logit multipliers)
    x = softcap * tanh(x / softcap)           (softcap 0: off; Gemma 2's logits)

In a low precision each step is rounded, as transformers' separate ops do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def affine(x: Tensor, scale: float = 1.0, softcap: float = 0.0, clip: float = 0.0) -> Tensor:
    """Return the clipped, scaled, capped ``x``: a new tensor of its shape and dtype."""
    y = x.clamp(-clip, clip) if clip else x
    if scale != 1.0:
        y = y * scale
    if softcap:
        y = torch.tanh(y / softcap) * softcap
    return y.clone() if y is x else y


register_reference("affine", affine, inline=True)
