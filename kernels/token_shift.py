"""token_shift: the row of the token before, and blend: a mixture of a row and the one before by channel (RWKV)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks import Part
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def token_shift(
    x: Tensor, memory: Tensor, blocks: Tensor, offset: Tensor, q_starts: Tensor, positions: Tensor, kv_lens: Tensor
) -> Tensor:
    """Return each token's predecessor, zeros for a sequence's first token and for rows of no live sequence.

    Shapes: x [T, C]; result [T, C]; the rest as ``graph.scan_ops`` says.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    live = part.live()
    for item in live:
        before = part.read([item], (x.shape[1],), x.dtype)
        out[item.rows] = torch.cat([before, x[item.rows][:-1]])
        part.write([item], x[item.rows][-1:])
    return out


def blend(x: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """Return x * share + before * (1 - share). Shapes: x, before [T, C]; share [C]."""
    return x * share + before * (1 - share)


def _of_known_types(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "x") <= native.DTYPES.keys()


register_reference("token_shift", token_shift, inline=False)
register_reference("blend", blend, inline=True)
register_triton("token_shift", "token_shift_triton", _of_known_types, invariant=True)
