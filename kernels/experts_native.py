"""How a CPU runs a mixture of experts, with plain weights or int8 ones: the C++ kernel, or products expert by expert.

With few rows an expert the C++ kernel is bound by reading the experts that are visited, each once. With many, the rows
of an expert are gathered for torch's product; int8 weights are dequantised one expert at a time for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.registry import dtypes_of

if TYPE_CHECKING:
    from treadle.graph.target import Target

FEW_ROWS = 16
"""Up to this many rows an expert, if all are visited alike, the C++ kernel serves."""

ACTS = {
    "silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "gelu_tanh": 2, "gelu_new": 2, "gelu_fast": 2,
    "quick_gelu": 3, "relu": 4, "relu2": 5, "sigmoid": 6, "tanh": 7, "linear": 8, "none": 8, "swiglu_oai": 9,
    "situ": 10,
}  # fmt: skip
"""Activations as the C++ side numbers them."""

Activate = Callable[..., Tensor]


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i, f = native.POINTER, native.LONG, native.INT, native.FLOAT
    return native.function("experts", "treadle_experts", (i, *[p] * 10, *[n] * 6, i, i, f, f, f, f, i, i))


@functools.cache
def _dequantize_entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return native.function("linear", "treadle_dequantize_int8", (i, p, p, p, n, n, n, i))


def supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    """Return whether the target is a CPU with a compiler, and the kernel knows dtypes and activation."""
    if target.device != "cpu" or attrs.get("act", "silu") not in ACTS:
        return False
    names = ("x", "up_bias", "down_bias")
    dtypes = dtypes_of(target, attrs, *names) if "up_scale" in attrs.get("dtypes", {}) else None
    dtypes = dtypes or dtypes_of(target, attrs, *names, "up", "down")
    return len(dtypes) == 1 and dtypes <= native.DTYPES.keys() and native.usable("experts") and native.usable("linear")


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    group: int,
    activate: Activate,
    options: tuple[str, bool, float, float, float, float],
    weigh_input: bool,
    *,
    invariant: bool = False,
) -> Tensor:
    """Return ``experts``'s result. ``options`` are those of ``activate``; scales come with int8 weights.

    ``invariant``: by the C++ kernel always, whose sums have one order however many rows visit an expert.
    """
    tokens, chosen = ids.shape
    count, channels, inner = down.shape
    if tokens * chosen > FEW_ROWS * count and not invariant:
        product = functools.partial(_product, dtype=x.dtype, group=group)
        up_of, down_of = (functools.partial(product, *each) for each in ((up, up_scale), (down, down_scale)))
        return by_expert(x, weights, ids, count, up_of, up_bias, down_of, down_bias, activate, options, weigh_input)
    x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.to(torch.int32).contiguous()
    y = torch.empty_like(x)
    act, gated, limit, alpha, beta, linear_beta = options
    _entry()(
        native.DTYPES[x.dtype],
        *(None if each is None else each.data_ptr() for each in (x, weights, ids, up, up_scale, up_bias)),
        *(None if each is None else each.data_ptr() for each in (down, down_scale, down_bias, y)),
        tokens,
        chosen,
        count,
        channels,
        inner,
        group,
        ACTS[act],
        gated,
        limit,
        alpha,
        beta,
        linear_beta,
        weigh_input,
        torch.get_num_threads(),
    )
    return y


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    count: int,
    up_of: Callable[[int], Tensor],
    up_bias: Tensor | None,
    down_of: Callable[[int], Tensor],
    down_bias: Tensor | None,
    activate: Activate,
    options: tuple[str, bool, float, float, float, float],
    weigh_input: bool,
) -> Tensor:
    """Return ``experts``'s result, sorted by expert; ``up_of`` and ``down_of`` give the matrices of one."""
    chosen = ids.shape[1]
    flat, share = ids.reshape(-1), weights.reshape(-1, 1)
    valid = (flat >= 0) & (flat < count)
    sizes = torch.bincount(flat[valid], minlength=count).tolist()
    order = torch.where(valid, flat, count).argsort(stable=True)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, size in enumerate(sizes):
        if not size:
            continue
        pairs = order[start : start + size]
        start += size
        rows = pairs // chosen
        inputs = x[rows]
        if weigh_input:
            inputs = inputs * share[pairs].to(x.dtype)
        hidden = F.linear(inputs, up_of(expert), None if up_bias is None else up_bias[expert])
        hidden = activate(hidden, *options)
        outputs = F.linear(hidden, down_of(expert), None if down_bias is None else down_bias[expert]).float()
        result.index_add_(0, rows, outputs if weigh_input else outputs * share[pairs])
    return result.to(x.dtype)


def _product(stack: Tensor, scale: Tensor | None, expert: int, *, dtype: torch.dtype, group: int) -> Tensor:
    """Return one expert's matrix in ``dtype``."""
    if scale is None:
        return stack[expert]
    _, rows, width = stack.shape
    matrix = torch.empty(rows, width, dtype=dtype)
    _dequantize_entry()(
        native.DTYPES[dtype],
        stack[expert].data_ptr(),
        scale[expert].data_ptr(),
        matrix.data_ptr(),
        rows,
        width,
        group,
        torch.get_num_threads(),
    )
    return matrix
