"""linear_int8: a linear layer whose weight is int8 with one fp32 scale per (row, group of the K channels).

    y = x (weight * scale)^T + b

Weight-only and symmetric: the activations are not quantised, and accumulation is in fp32. For a few rows of x the C++
kernel converts the weight in registers, bound by reading it once; for more it is dequantised block by block to the
dtype of x, while the block is in the cache, for torch's product. For a GPU there is ``linear_int8_triton``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.graph.footprint import INT8_GROUP
from treadle.kernels import native
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, if_deterministic, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target

SKINNY_TOKENS = 16
"""Up to this many rows of x the product is made on int8 weights in registers."""

BLOCK_BYTES = 4 << 20
"""Size of a dequantised block: several times smaller than the last-level cache."""


def quantize_int8(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (int8 weight [N, K], fp32 scale [N, K / group]): symmetric, absmax / 127, rounded to nearest.

    A group of zeros gets scale 0. Raises: ValueError if ``group`` does not divide K.
    """
    rows, width = weight.shape
    if group <= 0 or width % group:
        raise ValueError(f"quantize_int8: group {group} does not divide {width} input channels; {width} always works")
    blocks = weight.float().view(rows, width // group, group)
    scale = blocks.abs().amax(-1) / 127.0
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    codes = (blocks * inverse.unsqueeze(-1)).round_().clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, width), scale


def dequantize_int8(weight: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return ``weight * scale`` in fp32. Shapes: weight [N, K]; scale [N, K / group]; result [N, K]."""
    blocks = weight.float().view(*scale.shape, group)
    return (blocks * scale.unsqueeze(-1)).view(weight.shape)


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Return the product, in the dtype of ``x``.

    Shapes: x [..., K]; weight [N, K] int8; scale [N, K / group] fp32; bias [N]; result [..., N].
    """
    y = F.linear(x.float(), dequantize_int8(weight, scale, group), None if bias is None else bias.float())
    return y.to(x.dtype)


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return native.function("linear", "treadle_linear_int8", (i, p, p, p, p, p, n, n, n, n, i))


@functools.cache
def _dequantize_entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return native.function("linear", "treadle_dequantize_int8", (i, p, p, p, n, n, n, i))


def linear_int8_cpp(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Return ``linear_int8``'s result by the C++ kernel. Shapes: as ``linear_int8``; weight and scale contiguous."""
    x = x.contiguous()
    if x.numel() // weight.shape[1] > SKINNY_TOKENS:
        return _by_blocks(x, weight, scale, bias, group)
    return _multiply(x, weight, scale, bias, group)


def linear_int8_cpp_invariant(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Return ``linear_int8``'s result by the C++ kernel, in one order of sums for any number of rows."""
    return _multiply(x.contiguous(), weight, scale, bias, group)


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    outputs, width = weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    _entry()(
        native.DTYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        outputs,
        width,
        group,
        torch.get_num_threads(),
    )
    return y


def _by_blocks(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    outputs, width = weight.shape
    rows = min(outputs, max(64, BLOCK_BYTES // (width * x.element_size())))
    block = x.new_empty(rows, width)
    parts = []
    for first in range(0, outputs, rows):
        count = min(rows, outputs - first)
        _dequantize_entry()(
            native.DTYPES[x.dtype],
            weight[first].data_ptr(),
            scale[first].data_ptr(),
            block.data_ptr(),
            count,
            width,
            group,
            torch.get_num_threads(),
        )
        parts.append(F.linear(x, block[:count], None if bias is None else bias[first : first + count]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    if target.device != "cpu":
        return False
    dtypes = dtypes_of(target, attrs, "x", "bias")
    return len(dtypes) == 1 and dtypes <= native.DTYPES.keys() and native.usable("linear")


def _is_group_of_tensor_cores(target: Target, attrs: Mapping[str, Any]) -> bool:
    dtypes, group = dtypes_of(target, attrs, "x", "bias"), attrs.get("group", INT8_GROUP)
    return len(dtypes) == 1 and dtypes <= native.DTYPES.keys() and group >= 16 and group & (group - 1) == 0


register_reference("linear_int8", linear_int8, inline=True, invariant=False)
register(
    Kernel(
        op="linear_int8",
        name="linear_int8.cpp",
        function=define_opaque("linear_int8", "cpp", linear_int8_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
    )
)
register(
    Kernel(
        op="linear_int8",
        name="linear_int8.cpp_invariant",
        function=define_opaque("linear_int8", "cpp_invariant", linear_int8_cpp_invariant, "cpu"),
        inline=False,
        supports=if_deterministic(_supports),
        priority=11,
        invariant=True,
    )
)
register_triton("linear_int8", "linear_int8_triton", _is_group_of_tensor_cores, invariant=True)
