"""Triton kernels of activation, act_mul and gated_activation, and the pointwise functions that others fuse."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.skinny import launch_options

BLOCK = 1024

SPELLINGS = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "none": "linear",
}
"""Names of config.json that mean another one's function."""


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of fp32 values, to an absolute error of 1e-7."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def apply(x, ACT: tl.constexpr):
    """Return the activation of fp32 values; names as ``SPELLINGS`` resolves them."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACT == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
    elif ACT == "tanh":
        y = tanh(x)
    elif ACT == "softplus":
        y = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.where(x > 20.0, 20.0, x))))
    else:
        tl.static_assert(ACT == "linear", "no such activation")
        y = x
    return y


@triton.jit
def _pointwise(
    gate, up, out, width, gate_stride, up_stride, ACT: tl.constexpr, MUL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = apply(tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32), ACT)
    if MUL:
        y = y.to(dtype).to(tl.float32) * tl.load(up + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + c, y.to(dtype), mask=mask)


def activation(x: Tensor, act: str, *, pdl: bool = False) -> Tensor:
    """Return ``act(x)``, contiguous."""
    return _run(x, None, act, pdl)


def act_mul(gate: Tensor, up: Tensor, act: str, *, pdl: bool = False) -> Tensor:
    """Return ``act(gate) * up``, contiguous."""
    return _run(gate, up, act, pdl)


def gated_activation(x: Tensor, act: str, *, pdl: bool = False) -> Tensor:
    """Return ``act(first half) * second half`` of the last dim, contiguous."""
    gate, up = x.chunk(2, -1)
    return _run(gate, up, act, pdl)


def _run(gate: Tensor, up: Tensor | None, act: str, pdl: bool) -> Tensor:
    out = gate.new_empty(gate.shape)
    if out.numel() == 0:
        return out
    left = _rows(gate)
    right = left if up is None else _rows(up)
    rows, width = left.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _pointwise[(triton.cdiv(width, block), rows)](
        left, right, out, width, left.stride(0), right.stride(0),
        ACT=SPELLINGS.get(act, act), MUL=up is not None, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """Return x as [rows, width] with a dense last dim."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])
