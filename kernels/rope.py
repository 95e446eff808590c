"""rope: rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864).

Pairs (a, b) of the R rotated channels turn by the angle of their row of the table (c = cos, s = sin):

    half, interleaved   (a, b) -> (a c - b s, b c + a s)
    half_neg            (a, b) -> (a c + b s, b c - a s)      nanochat
    inverse             s -> -s

half pairs channel i with i + R/2, interleaved 2i with 2i + 1. The products are made in the wider of the dtypes of x and
table and rounded once: an fp32 table gives fp32 products (OLMo, Cohere, Ernie); a table in the model's dtype gives the
rounding of transformers' Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference

LAYOUTS = ("half", "interleaved", "half_neg")


def rope(
    x: Tensor, positions: Tensor, table: Tensor, layout: str = "half", at: str = "head", inverse: bool = False
) -> Tensor:
    """Return ``x`` with R of its D channels rotated: the first (at "head") or the last (at "tail").

    A negative position uses row 0.
    Shapes: x [T, H, D]; positions [T] int64; table [L, R] = cos [R/2] ++ sin [R/2]; R <= D.
    Raises: ValueError for an unknown ``layout`` or ``at``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"rope: layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if at not in ("head", "tail"):
        raise ValueError(f"rope: at={at!r} is neither 'head' nor 'tail'")
    width, rotated = x.shape[-1], table.shape[-1]
    cos, sin = table[positions.clamp(min=0)].unsqueeze(1).chunk(2, -1)
    if inverse != (layout == "half_neg"):
        sin = -sin
    start = 0 if at == "head" else width - rotated
    part = x[..., start : start + rotated].to(torch.promote_types(x.dtype, table.dtype))
    if layout == "interleaved":
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    turned = turned.to(x.dtype)
    if rotated == width:
        return turned
    rest = x[..., rotated:] if at == "head" else x[..., :start]
    return torch.cat([turned, rest] if at == "head" else [rest, turned], -1)


register_reference("rope", rope, inline=True)
