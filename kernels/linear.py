"""linear: y = x W^T + b, accumulated in fp32.

For a few rows of x the product is bound by reading W once; the C++ kernel does that. For more, torch's does.
The C++ kernel adds the products of a row in one order, however many rows there are: where a row's result may depend on
that row alone, it serves any number of them on a CPU, and ``linear_rows`` does on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.linear_rows import register_linear_rows
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, if_deterministic, register, register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target

SKINNY_TOKENS = 8
"""Up to this many rows of x the C++ kernel is faster than torch's product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product, in the dtype of ``x``. Shapes: x [..., K]; weight [N, K]; bias [N]; result [..., N]."""
    return F.linear(x, weight, bias)


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return native.function("linear", "treadle_linear", (i, p, p, p, p, n, n, n, i))


def linear_cpp(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``linear``'s result by the C++ kernel, or by torch when x has many rows. Shapes: as ``linear``."""
    if x.numel() > SKINNY_TOKENS * weight.shape[1] or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    return _multiply(x.contiguous(), weight, bias)


def linear_cpp_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``linear``'s result by the C++ kernel, whatever the number of rows. Shapes: as ``linear``."""
    return _multiply(x.contiguous(), weight.contiguous(), bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, width = weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    _entry()(
        native.DTYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        outputs,
        width,
        torch.get_num_threads(),
    )
    return y


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    if target.device != "cpu":
        return False
    dtypes = dtypes_of(target, attrs, "x", "weight", "bias")
    return len(dtypes) == 1 and dtypes <= native.DTYPES.keys() and native.usable("linear")


register_reference("linear", linear, inline=True, invariant=False)
register(
    Kernel(
        op="linear",
        name="linear.cpp",
        function=define_opaque("linear", "cpp", linear_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
    )
)
register(
    Kernel(
        op="linear",
        name="linear.cpp_invariant",
        function=define_opaque("linear", "cpp_invariant", linear_cpp_invariant, "cpu"),
        inline=False,
        supports=if_deterministic(_supports),
        priority=11,
        invariant=True,
    )
)
register_linear_rows()
register_triton("linear", "linear_triton", skinny("x", "weight", "bias"))
