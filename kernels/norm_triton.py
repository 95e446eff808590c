"""Triton kernels of norm and add_norm: a program normalises a few short rows, or one long one.

Every rounding of the references is kept: see ``norm`` for what ``cast`` means, ``add`` for the sum.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.add import add
from treadle.kernels.skinny import launch_options

LONGEST_TILE = 16384
"""rows up to this are read once; longer ones in steps of STEP"""

STEP = 4096
TILE = 2048
"""elements that a program should have at least"""


@triton.jit
def normalise(y, mask, width, eps, KIND: tl.constexpr):
    """Return rows [R, C] of fp32, 0 where masked out, over their own statistics."""
    if KIND == "layer":
        y = tl.where(mask, y - (tl.sum(y, 1) / width)[:, None], 0.0)
    total = tl.sum(y * y, 1)
    if KIND != "l2":
        total = total / width
    return y * tl.rsqrt(total + eps)[:, None]


@triton.jit
def statistics(x, at, live, width, eps, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return what to subtract from, and then multiply, rows of ``width`` that begin at ``x + at`` [R]."""
    columns = tl.arange(0, C)
    mean = tl.zeros([R], tl.float32)
    if KIND == "layer":
        part = tl.zeros([R, C], tl.float32)
        for start in range(0, width, C):
            mask = live[:, None] & (start + columns < width)[None, :]
            part += tl.load(x + at[:, None] + (start + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(part, 1) / width
    part = tl.zeros([R, C], tl.float32)
    for start in range(0, width, C):
        mask = live[:, None] & (start + columns < width)[None, :]
        y = tl.load(x + at[:, None] + (start + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.where(mask, y - mean[:, None], 0.0)
        part += y * y
    total = tl.sum(part, 1)
    if KIND != "l2":
        total = total / width
    return mean, tl.rsqrt(total + eps)


@triton.jit
def weighted(
    y, w, b, dtype: tl.constexpr, AFTER: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
):  # fmt: skip
    """Return normalised fp32 values times weights plus biases, rounded to ``dtype`` where ``cast`` says so."""
    if AFTER:
        y = y.to(dtype).to(tl.float32)
    if HAS_W:
        w = w.to(tl.float32)
        if PLUS_ONE:
            w += 1.0
            if AFTER:
                w = w.to(dtype).to(tl.float32)
        y = y * w
        if AFTER:
            y = y.to(dtype).to(tl.float32)
    if HAS_B:
        y += b.to(tl.float32)
    return y.to(dtype)


@triton.jit
def _norm(
    x, other, w, b, total, out, rows, inner, width, w_rows, b_rows, x0, x1, o0, o1, eps, alpha, beta,
    KIND: tl.constexpr, AFTER: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of ``width`` at x + outer * x0 + inner * x1; row r of the result has weight row r % w_rows."""
    dtype: tl.constexpr = out.dtype.element_ty
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, C)
    live = r < rows
    mask = live[:, None] & (c < width)[None, :]
    outer = (r // inner).to(tl.int64)
    x_at = (outer * x0 + (r % inner) * x1)[:, None] + c[None, :]
    w_at = (r % w_rows)[:, None] * width + c[None, :]
    b_at = (r % b_rows)[:, None] * width + c[None, :]
    out_at = r.to(tl.int64)[:, None] * width + c[None, :]
    weight = tl.load(w + w_at, mask=mask, other=0.0) if HAS_W else 0.0
    bias = tl.load(b + b_at, mask=mask, other=0.0) if HAS_B else 0.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        o_at = (outer * o0 + (r % inner) * o1)[:, None] + c[None, :]
        right = tl.load(other + o_at, mask=mask, other=0.0).to(tl.float32)
        y = (y * alpha).to(dtype).to(tl.float32) + (right * beta).to(dtype).to(tl.float32)
        tl.store(total + out_at, y.to(dtype), mask=mask)
        y = y.to(dtype).to(tl.float32)
    y = normalise(y, mask, width, eps, KIND)
    tl.store(out + out_at, weighted(y, weight, bias, dtype, AFTER, PLUS_ONE, HAS_W, HAS_B), mask=mask)


@triton.jit
def _norm_long(
    x, w, b, out, inner, width, w_rows, b_rows, x0, x1, eps,
    KIND: tl.constexpr, AFTER: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one row that does not fit in registers."""
    dtype: tl.constexpr = out.dtype.element_ty
    r = tl.program_id(0) + tl.arange(0, 1)
    c = tl.arange(0, C)
    x_at = (r // inner).to(tl.int64) * x0 + (r % inner) * x1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mean, inverse = statistics(x, x_at, r >= 0, width, eps, KIND, 1, C)
    for start in range(0, width, C):
        at = (start + c)[None, :]
        mask = at < width
        y = tl.load(x + x_at[:, None] + at, mask=mask, other=0.0).to(tl.float32)
        y = (y - mean[:, None]) * inverse[:, None]
        weight = tl.load(w + (r % w_rows)[:, None] * width + at, mask=mask, other=0.0) if HAS_W else 0.0
        bias = tl.load(b + (r % b_rows)[:, None] * width + at, mask=mask, other=0.0) if HAS_B else 0.0
        y = weighted(y, weight, bias, dtype, AFTER, PLUS_ONE, HAS_W, HAS_B)
        tl.store(out + r.to(tl.int64)[:, None] * width + at, y, mask=mask)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    groups: int = 1,
    cast: str = "after",
    *,
    pdl: bool = False,
) -> Tensor:
    """Return the normalised ``x``, contiguous. Shapes: as the reference's."""
    out = x.new_empty(x.shape)
    _run(x, None, weight, bias, None, out, 1.0, 1.0, kind, eps, plus_one, groups, cast, pdl)
    return out


def add_norm(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float = 1.0,
    beta: float = 1.0,
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    groups: int = 1,
    cast: str = "after",
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm, contiguous. Shapes: as the reference's."""
    if a.shape[-1] // groups > LONGEST_TILE:
        total = add(a, b, alpha, beta)
        return total, norm(total, weight, bias, kind, eps, plus_one, groups, cast, pdl=pdl)
    total, out = a.new_empty(a.shape), a.new_empty(a.shape)
    _run(a, b, weight, bias, total, out, alpha, beta, kind, eps, plus_one, groups, cast, pdl)
    return total, out


def _run(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    kind: str,
    eps: float,
    plus_one: bool,
    groups: int,
    cast: str,
    pdl: bool,
) -> None:
    if out.numel() == 0:
        return
    rows = _rows(x, groups)
    outer, inner, width = rows.shape
    right = rows if other is None else _rows(other, groups)
    w, w_rows = _parameter(weight, x, width)
    b, b_rows = _parameter(bias, x, width)
    flags: dict[str, Any] = {
        "KIND": kind,
        "AFTER": cast == "after" and kind != "layer",
        "PLUS_ONE": plus_one,
        "HAS_W": weight is not None,
        "HAS_B": bias is not None,
        "PDL": pdl,
        **launch_options(pdl),
    }
    if flags["AFTER"] and bias is not None and not triton.knobs.runtime.interpret:
        # Or the compiler makes one operation of weight and bias, in the low precision, and a rounding is lost.
        flags["enable_fp_fusion"] = False
    if width > LONGEST_TILE:
        _norm_long[(outer * inner,)](
            rows, w, b, out, inner, width, w_rows, b_rows, rows.stride(0), rows.stride(1), eps,
            **flags, C=STEP, num_warps=8,
        )  # fmt: skip
        return
    columns = triton.next_power_of_2(width)
    each = max(1, min(TILE // columns, triton.next_power_of_2(outer * inner)))
    _norm[(triton.cdiv(outer * inner, each),)](
        rows, right, w, b, out if total is None else total, out, outer * inner, inner, width, w_rows, b_rows,
        rows.stride(0), rows.stride(1), right.stride(0), right.stride(1), eps, alpha, beta,
        **flags, ADD=total is not None, R=each, C=columns, num_warps=_warps(each * columns),
    )  # fmt: skip


def _rows(x: Tensor, groups: int) -> Tensor:
    """Return x as [outer, inner, width of a group], its last dim dense; a copy only where strides allow no view."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    channels = x.shape[-1]
    rows = x.reshape(-1, 1, channels) if x.dim() < 3 else x.reshape(-1, *x.shape[-2:])
    if groups == 1:
        return rows
    if rows.shape[1] > 1 and rows.stride(1) != channels:
        rows = rows.contiguous()
    return rows.reshape(rows.shape[0], rows.shape[1] * groups, channels // groups)


def _parameter(weight: Tensor | None, x: Tensor, width: int) -> tuple[Tensor, int]:
    """Return a weight or bias as dense rows of ``width``, and how many there are; row r of x has row r % count."""
    if weight is None:
        return x, 1
    dense = weight.expand(x.shape[x.dim() - weight.dim() :]).contiguous()
    return dense, dense.numel() // width


def _warps(elements: int) -> int:
    return 4 if elements <= 4096 else 8 if elements <= 8192 else 16
