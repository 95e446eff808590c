"""embed_int8: rows of an int8 table (as in ``linear_int8``: one table serves a tied embedding and head).

    out[t] = round(weight[ids[t]] * scale[ids[t]]) * scale_out

The row is rounded to the result's dtype, and so is ``scale_out``, as ``embed`` does with a table of that dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.embed import round_scalar
from treadle.kernels.linear_int8 import dequantize_int8
from treadle.kernels.registry import register_reference


def embed_int8(
    ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, group: int, scale_out: float = 1.0
) -> Tensor:
    """Return the rows ``ids``, dequantised to ``dtype`` and scaled.

    Shapes: ids [T] int64 in [0, V); weight [V, C] int8; scale [V, C / group] fp32; result [T, C].
    """
    rows = dequantize_int8(weight[ids], scale[ids], group).to(dtype)
    return rows if scale_out == 1.0 else rows * round_scalar(scale_out, dtype)


register_reference("embed_int8", embed_int8, inline=True)
