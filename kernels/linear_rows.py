"""linear on a GPU such that a row's result depends on that row alone: the library is always called for ROWS rows.

A library of matrix products chooses its algorithm, and with it the order in which products are added, by the shape.
Here rows go in blocks of ROWS, the last one padded with zeros, so that there is one shape for each weight. Whether the
place of a row inside a block matters is the library's affair: a test on the device asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.graph.workspace import INVARIANT_ROWS
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register
from treadle.kernels.skinny import DTYPES

if TYPE_CHECKING:
    from treadle.graph.target import Target

ROWS = INVARIANT_ROWS
ALIGNMENT = 256
"""Bytes at whose multiples blocks begin: libraries look at that too."""


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, contiguous. Shapes: x [..., K]; weight [N, K]; bias [N]; result [..., N]."""
    outputs, width = weight.shape
    rows = x.reshape(-1, width).contiguous()
    count = len(rows)
    whole = count // ROWS * ROWS
    y = rows.new_empty((-(-count // ROWS) * ROWS, outputs))
    for first in range(0, count, ROWS):
        block = rows[first : first + ROWS]
        if first == whole or block.data_ptr() % ALIGNMENT:
            padded = rows.new_zeros(ROWS, width)
            padded[: len(block)] = block
            block = padded
        if bias is None:
            torch.mm(block, weight.t(), out=y[first : first + ROWS])
        else:
            torch.addmm(bias, block, weight.t(), out=y[first : first + ROWS])
    return y[:count].view(*x.shape[:-1], outputs)


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    dtypes = dtypes_of(target, attrs, "x", "weight", "bias")
    return target.deterministic and target.device == "cuda" and len(dtypes) == 1 and dtypes <= DTYPES


def register_linear_rows() -> None:
    """Make it a kernel of ``linear`` for deterministic targets."""
    register(
        Kernel(
            op="linear",
            name="linear.rows",
            function=define_opaque("linear", "rows", linear_rows, "cuda"),
            inline=False,
            supports=_supports,
            priority=10,
            invariant=True,
        )
    )
