"""Triton kernels of linear_int8: weights are read in int8, and never widened in memory unless x has many rows.

few    up to FEW_ROWS rows of x: bound by reading the weights once. A group of 32 channels at a time is multiplied on
       the tensor cores in int8 values, which every float holds exactly, and the sums are scaled
tiles  more rows: a tile of weights is scaled to the dtype of x in registers
wide   beyond TILED_ROWS: the weights are scaled to the dtype of x in memory, a block of outputs at a time, for
       torch's product, which is the fastest once that is little beside it
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.workspace import WIDENED_BYTES
from treadle.kernels.skinny import launch_options

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FEW_ROWS = 16
TILED_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Int8Blocks:
    """How a product is cut."""

    rows: int
    """of x that a program takes"""
    outputs: int
    """rows of weights that it takes"""
    columns: int
    """of both at a time; in few: whole groups"""
    warps: int = 4
    stages: int = 3


INVARIANT = Int8Blocks(rows=64, outputs=64, columns=64)
"""For any number of rows, where a row's result may depend on that row alone."""


def choose(rows: int, outputs: int) -> Int8Blocks:
    """Return how to cut a product of so many rows of x: small blocks where there are few, to fill a device."""
    if rows <= FEW_ROWS:
        padded = max(8, int(triton.next_power_of_2(rows)))
        if outputs <= 8192:
            return Int8Blocks(rows=padded, outputs=16, columns=256, warps=1, stages=4)
        return Int8Blocks(rows=padded, outputs=64, columns=128, warps=4, stages=4)
    if rows <= 64:
        return Int8Blocks(rows=max(16, int(triton.next_power_of_2(rows))), outputs=64, columns=64)
    return Int8Blocks(rows=128, outputs=128, columns=64, warps=8)


@triton.jit
def _store(acc, y, bias, t, n, T, N, HAS_BIAS: tl.constexpr):
    """Store sums [outputs n, rows t]."""
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = y + t.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize=["T"])
def few(
    x, weight, scale, bias, y, x_stride, T, N, K,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BN outputs; T is at most BT."""
    t, n = tl.arange(0, BT), tl.program_id(0) * BN + tl.arange(0, BN)
    k, part = tl.arange(0, GROUP), n < N
    codes_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    scale_at = scale + n.to(tl.int64) * (K // GROUP)
    x_at = x + t[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BT), tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, K, BK):
        for skip in tl.static_range(0, BK, GROUP):
            at = start + skip
            inside = at + k < K
            codes_in, factor_in, rows_in = part[:, None] & inside[None, :], part & (at + n * 0 < K), inside[:, None]
            codes = tl.load(codes_at + at, mask=codes_in, other=0, eviction_policy="evict_first")
            factor = tl.load(scale_at + at // GROUP, mask=factor_in, other=0.0)
            rows = tl.load(x_at + at, mask=rows_in & (t < T)[None, :], other=0.0).to(COMPUTE)
            acc += tl.dot(codes.to(COMPUTE), rows, input_precision=PRECISION) * factor[:, None]
    _store(acc, y, bias, t, n, T, N, HAS_BIAS)


@triton.jit(do_not_specialize=["T"])
def tiles(
    x, weight, scale, bias, y, x_stride, T, N, K,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BT rows of x, blocks of BN outputs); neighbours share weights."""
    t, n = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    codes_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    scale_at = scale + n.to(tl.int64)[:, None] * (K // GROUP)
    x_at = x + t.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BT), tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, K, BK):
        inside, outputs = start + k < K, (n < N)[:, None]
        codes = tl.load(codes_at + start, mask=outputs & inside[None, :], other=0)
        factor = tl.load(scale_at + (start + k)[None, :] // GROUP, mask=outputs & inside[None, :], other=0.0)
        rows = tl.load(x_at + start, mask=(t < T)[None, :] & inside[:, None], other=0.0).to(COMPUTE)
        scaled = (codes.to(tl.float32) * factor).to(x.dtype.element_ty).to(COMPUTE)
        acc = tl.dot(scaled, rows, acc, input_precision=PRECISION)
    _store(acc, y, bias, t, n, T, N, HAS_BIAS)


@triton.jit
def widen(weight, scale, result, count, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: blocks of BLOCK weights; ``count`` of them are scaled to the dtype of the result."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(weight + at, mask=at < count, other=0).to(tl.float32)
    factor = tl.load(scale + at // GROUP, mask=at < count, other=0.0)
    tl.store(result + at, (codes * factor).to(result.dtype.element_ty), mask=at < count)


def linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int, *, pdl: bool = False,
    invariant: bool = False, blocks: Int8Blocks | None = None,
) -> Tensor:  # fmt: skip
    """Return ``linear_int8``'s result, contiguous; ``blocks`` replaces what would be chosen.

    ``invariant``: one way and one choice for any number of rows.

    Shapes: as the reference's; weight and scale contiguous.
    """
    outputs, width = weight.shape
    blocks = INVARIANT if invariant else blocks
    rows = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, width)
    if len(rows) > TILED_ROWS and blocks is None:
        return _wide(rows, weight, scale, bias, group).view(*x.shape[:-1], outputs)
    y = x.new_empty((*x.shape[:-1], outputs))
    if y.numel() == 0:
        return y
    cut = blocks or choose(len(rows), outputs)
    is_few = len(rows) <= min(FEW_ROWS, cut.rows) and not invariant
    grid = (triton.cdiv(outputs, cut.outputs),)
    # The interpreter's bfloat16 arithmetic is wrong.
    exact = triton.knobs.runtime.interpret or x.dtype == torch.float32
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(pdl)}
    (few if is_few else tiles)[grid if is_few else (triton.cdiv(len(rows), cut.rows), *grid)](
        rows, weight, scale, x if bias is None else bias, y, rows.stride(0), len(rows), outputs, width,
        GROUP=group, HAS_BIAS=bias is not None, BT=cut.rows, BN=cut.outputs, BK=cut.columns,
        COMPUTE=tl.float32 if exact else ELEMENTS[x.dtype],
        # Three products of tensor cores make one in float32.
        PRECISION="tf32x3" if x.dtype == torch.float32 else "ieee", PDL=pdl, **options,
    )  # fmt: skip
    return y


def _wide(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    outputs, width = weight.shape
    most = max(64, WIDENED_BYTES // (width * x.element_size()))
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, most):
        some = weight[first : first + most]
        block = torch.empty(some.shape, dtype=x.dtype, device=x.device)
        widen[(triton.cdiv(block.numel(), 1024),)](
            some, scale[first : first + most], block, block.numel(), GROUP=group, BLOCK=1024, num_warps=4
        )  # fmt: skip
        part = y[:, first : first + most]
        if bias is None:
            torch.mm(x, block.t(), out=part)
        else:
            torch.addmm(bias[first : first + most], x, block.t(), out=part)
    return y
