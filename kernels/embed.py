"""embed: rows of a table, times a scale.

    out[t] = weight[ids[t]] * scale

Gemma multiplies by sqrt(hidden) *rounded to the weight's dtype* (transformers: GemmaTextScaledWordEmbedding).
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def round_scalar(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` rounded (to nearest, ties to even) to a float dtype, without making a tensor.

    A tensor's ``item()`` would break symbolic tracing.
    """
    if dtype == torch.float16:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    rounded = float(struct.unpack("f", struct.pack("f", value))[0])
    if dtype != torch.bfloat16:
        return rounded
    bits = struct.unpack("I", struct.pack("f", rounded))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def embed(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Return the rows ``ids`` of ``weight``, scaled.

    Shapes: ids [T] int64, every one in [0, V); weight [V, C]; result [T, C].
    """
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * round_scalar(scale, weight.dtype)


register_reference("embed", embed, inline=True)
