"""head_linear: every head by a matrix of its own, as a batched product.

out[t, h] = weight[h] @ x[t, h]
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.linear import linear_cpp_invariant
from treadle.kernels.linear_rows import ROWS
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.skinny import DTYPES

if TYPE_CHECKING:
    from treadle.graph.target import Target


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products, in the dtype of ``x``. Shapes: x [T, H, Di]; weight [H, Do, Di]; result [T, H, Do]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def head_linear_cpp(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products, a row's alike whatever other rows there are. Shapes: as ``head_linear``."""
    heads = zip(x.unbind(1), weight.unbind(0))
    return torch.stack([linear_cpp_invariant(rows, matrix) for rows, matrix in heads], 1)


def head_linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products on a GPU, always made for ROWS rows at a time. Shapes: as ``head_linear``."""
    count, heads, width = x.shape
    out = x.new_empty((count, heads, weight.shape[1]))
    for first in range(0, count, ROWS):
        rows = x[first : first + ROWS].transpose(0, 1)
        block = x.new_zeros((heads, ROWS, width))
        block[:, : rows.shape[1]] = rows
        made = torch.bmm(block, weight.transpose(1, 2))
        out[first : first + ROWS] = made.transpose(0, 1)[: rows.shape[1]]
    return out


def _supports(device: str, target: Target, attrs: Mapping[str, Any]) -> bool:
    if not target.deterministic or target.device != device:
        return False
    dtypes = dtypes_of(target, attrs, "x", "weight")
    return len(dtypes) == 1 and dtypes <= DTYPES and (device == "cuda" or native.usable("linear"))


register_reference("head_linear", head_linear, inline=True, invariant=False)
for _name, _function, _device in (("cpp", head_linear_cpp, "cpu"), ("rows", head_linear_rows, "cuda")):
    register(
        Kernel(
            op="head_linear",
            name=f"head_linear.{_name}",
            function=define_opaque("head_linear", _name, _function, _device),
            inline=False,
            supports=functools.partial(_supports, _device),
            priority=10,
            invariant=True,
        )
    )
