"""Triton kernels of linear, linear_add and norm_gated_linear for a few rows of x: bound by reading the weights once.

Three ways, chosen by ``linear_blocks``, of multiplying T rows of x with N rows of weights along K:

    held    a program reads BN whole rows of weights into registers, then goes through the rows of x
    looped  along K in steps of BK; products of all rows of x are added up in registers, each in its place
    dot     along K in steps of BK, on the tensor cores; x is padded to TP rows

The first weights are read before the kernel waits for its predecessor (``triton_kernel``: pdl), everything else after;
it lets its successor start only after that wait, so that whatever runs beside it is its direct neighbour.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.buckets import SKINNY_TOKENS
from treadle.kernels import activation_triton, norm_triton
from treadle.kernels.activation_triton import SPELLINGS, apply
from treadle.kernels.add import add
from treadle.kernels.linear_blocks import Blocks, choose
from treadle.kernels.norm_triton import normalise, statistics, weighted
from treadle.kernels.skinny import launch_options


@triton.jit
def _finish(
    o, u, t, n, inside, y, bias, residual, r_stride, N, alpha, beta,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Turn sums o, and u of the second half, [rows t, columns n], into results: rounded as the references round."""
    dtype: tl.constexpr = y.dtype.element_ty
    if HAS_BIAS:
        o += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    o = o.to(dtype).to(tl.float32)
    if ACT != "":
        if HAS_BIAS:
            u += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        o = apply(o, ACT).to(dtype).to(tl.float32) * u.to(dtype).to(tl.float32)
    if ADD:
        r = tl.load(residual + t[:, None] * r_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
        o = (r * alpha).to(dtype).to(tl.float32) + (o * beta).to(dtype).to(tl.float32)
    tl.store(y + t[:, None] * N + n[None, :], o.to(dtype), mask=inside)


@triton.jit
def _held(
    x, w, y, bias, residual, norm_w, norm_b, x_stride, r_stride, N, K, alpha, beta, eps,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    PLUS_ONE: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < N)[:, None] & row
    a = tl.load(w + at, mask=mask, other=0.0, eviction_policy="evict_first")
    b = a
    if ACT != "":
        b = tl.load(w + tl.cast(N, tl.int64) * K + at, mask=mask, other=0.0, eviction_policy="evict_first")
    nw = tl.load(norm_w + k[None, :], mask=row, other=0.0) if HAS_NW else 0.0
    nb = tl.load(norm_b + k[None, :], mask=row, other=0.0) if HAS_NB else 0.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in tl.static_range(T):
        v = tl.load(x + i * x_stride + k[None, :], mask=row, other=0.0).to(tl.float32)
        if NORM != "":
            v = weighted(normalise(v, row, K, eps, NORM), nw, nb, dtype, AFTER, PLUS_ONE, HAS_NW, HAS_NB)
            v = v.to(tl.float32)
        o = tl.sum(a.to(tl.float32) * v, 1)[None, :]
        u = o
        if ACT != "":
            u = tl.sum(b.to(tl.float32) * v, 1)[None, :]
        t = i + tl.arange(0, 1)
        _finish(o, u, t, n, (n < N)[None, :], y, bias, residual, r_stride, N, alpha, beta, ACT, HAS_BIAS, ADD)


@triton.jit
def _rows(
    x, norm_w, norm_b, at, k, live, mean, inverse, K,
    NORM: tl.constexpr, AFTER: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr,
):  # fmt: skip
    """Return columns k of rows of x at ``at``, normalised, in x's dtype; 0 outside."""
    dtype: tl.constexpr = x.dtype.element_ty
    mask = live[:, None] & (k < K)[None, :]
    v = tl.load(x + at[:, None] + k[None, :], mask=mask, other=0.0)
    if NORM != "":
        nw = tl.load(norm_w + k, mask=k < K, other=0.0)[None, :] if HAS_NW else 0.0
        nb = tl.load(norm_b + k, mask=k < K, other=0.0)[None, :] if HAS_NB else 0.0
        v = (v.to(tl.float32) - mean[:, None]) * inverse[:, None]
        v = tl.where(mask, weighted(v, nw, nb, dtype, AFTER, PLUS_ONE, HAS_NW, HAS_NB), 0.0)
    return v.to(dtype)


@triton.jit
def _nothing(TP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return what ``_added`` begins with."""
    if TP == 1:
        acc = tl.zeros([BN, BK], tl.float32)
    else:
        acc = tl.zeros([TP, BN, BK], tl.float32)
    return acc


@triton.jit
def _added(acc, a, v, TP: tl.constexpr):
    """Return acc plus products of weights a [BN, BK] and rows v [TP, BK], each in its place."""
    if TP == 1:
        acc += a.to(tl.float32) * v.to(tl.float32)
    else:
        acc += a.to(tl.float32)[None, :, :] * v.to(tl.float32)[:, None, :]
    return acc


@triton.jit
def _summed(acc, TP: tl.constexpr):
    """Return the sums [TP, BN] of what ``_added`` collected."""
    if TP == 1:
        o = tl.sum(acc, 1)[None, :]
    else:
        o = tl.sum(acc, 2)
    return o


@triton.jit
def _looped(
    x, w, y, bias, residual, norm_w, norm_b, x_stride, r_stride, N, K, alpha, beta, eps,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    PLUS_ONE: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    t = tl.arange(0, TP)
    at = n.to(tl.int64)[:, None] * K
    second = w + tl.cast(N, tl.int64) * K
    some = (n < N)[:, None]
    a = tl.load(w + at + k[None, :], mask=some & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    b = a
    if ACT != "":
        b = tl.load(second + at + k[None, :], mask=some & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mean = tl.zeros([TP], tl.float32)
    inverse = mean
    if NORM != "":
        mean, inverse = statistics(x, t * x_stride, t < T, K, eps, NORM, TP, BK)
    v = _rows(x, norm_w, norm_b, t * x_stride, k, t < T, mean, inverse, K, NORM, AFTER, PLUS_ONE, HAS_NW, HAS_NB)
    o = _added(_nothing(TP, BN, BK), a, v, TP)
    u = o
    if ACT != "":
        u = _added(_nothing(TP, BN, BK), b, v, TP)
    for start in range(BK, K, BK):
        at_k = start + k
        mask = some & (at_k < K)[None, :]
        a = tl.load(w + at + at_k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if ACT != "":
            b = tl.load(second + at + at_k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        v = _rows(x, norm_w, norm_b, t * x_stride, at_k, t < T, mean, inverse, K, NORM, AFTER, PLUS_ONE, HAS_NW, HAS_NB)
        o = _added(o, a, v, TP)
        if ACT != "":
            u = _added(u, b, v, TP)
    o = _summed(o, TP)
    if ACT != "":
        u = _summed(u, TP)
    inside = (t < T)[:, None] & (n < N)[None, :]
    _finish(o, u, t, n, inside, y, bias, residual, r_stride, N, alpha, beta, ACT, HAS_BIAS, ADD)


@triton.jit
def _dot(
    x, w, y, bias, residual, norm_w, norm_b, x_stride, r_stride, N, K, alpha, beta, eps,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    PLUS_ONE: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    t = tl.arange(0, TP)
    at = n.to(tl.int64)[:, None] * K
    second = w + tl.cast(N, tl.int64) * K
    some = (n < N)[:, None]
    a = tl.load(w + at + k[None, :], mask=some & (k < K)[None, :], other=0.0)
    b = a
    if ACT != "":
        b = tl.load(second + at + k[None, :], mask=some & (k < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mean = tl.zeros([TP], tl.float32)
    inverse = mean
    if NORM != "":
        mean, inverse = statistics(x, t * x_stride, t < T, K, eps, NORM, TP, BK)
    v = _rows(x, norm_w, norm_b, t * x_stride, k, t < T, mean, inverse, K, NORM, AFTER, PLUS_ONE, HAS_NW, HAS_NB)
    o = tl.dot(a, tl.trans(v), input_precision="ieee")
    u = o
    if ACT != "":
        u = tl.dot(b, tl.trans(v), input_precision="ieee")
    for start in range(BK, K, BK):
        at_k = start + k
        mask = some & (at_k < K)[None, :]
        a = tl.load(w + at + at_k[None, :], mask=mask, other=0.0)
        if ACT != "":
            b = tl.load(second + at + at_k[None, :], mask=mask, other=0.0)
        v = _rows(x, norm_w, norm_b, t * x_stride, at_k, t < T, mean, inverse, K, NORM, AFTER, PLUS_ONE, HAS_NW, HAS_NB)
        o = tl.dot(a, tl.trans(v), o, input_precision="ieee")
        if ACT != "":
            u = tl.dot(b, tl.trans(v), u, input_precision="ieee")
    inside = (t < T)[:, None] & (n < N)[None, :]
    _finish(tl.trans(o), tl.trans(u), t, n, inside, y, bias, residual, r_stride, N, alpha, beta, ACT, HAS_BIAS, ADD)


KERNELS = {"held": _held, "looped": _looped, "dot": _dot}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """Return x W^T + b, contiguous. Shapes: as the reference's."""
    rows = _few_rows(x, weight)
    if rows is None:
        return F.linear(x, weight, bias)
    outputs, width = weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    run(choose("linear", outputs, width, len(rows), x.dtype), rows, weight, y, bias=bias, pdl=pdl)
    return y


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return alpha * residual + beta * (x W^T + b), contiguous. Shapes: as the reference's."""
    rows = _few_rows(x, weight)
    if rows is None:
        return add(residual, F.linear(x, weight, bias), alpha, beta)
    outputs, width = weight.shape
    blocks = choose("linear_add", outputs, width, len(rows), x.dtype)
    y = x.new_empty((*x.shape[:-1], outputs))
    run(blocks, rows, weight, y, bias=bias, residual=_dense(residual), alpha=alpha, beta=beta, pdl=pdl)
    return y


def norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    kind: str,
    eps: float,
    plus_one: bool,
    groups: int,
    cast: str,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return act(first half) * second half of linear(norm(x)), contiguous. Shapes: as the reference's."""
    outputs, width = weight.shape[0] // 2, weight.shape[1]
    rows = _few_rows(x, weight)
    # one row of norm weights, and statistics over all of it, is what the kernels do on the way
    plain = groups == 1 and all(part is None or part.numel() == width for part in (norm_weight, norm_bias))
    if rows is None or not plain:
        h = norm_triton.norm(x, norm_weight, norm_bias, kind, eps, plus_one, groups, cast, pdl=pdl)
        return activation_triton.gated_activation(linear(h, weight, bias, pdl=pdl), act, pdl=pdl)
    blocks = choose("norm_gated_linear", outputs, width, len(rows), x.dtype)
    y = x.new_empty((*x.shape[:-1], outputs))
    run(
        blocks, rows, weight, y, bias=bias, act=SPELLINGS.get(act, act), norm=kind, norm_weight=norm_weight,
        norm_bias=norm_bias, eps=eps, plus_one=plus_one, after=cast == "after" and kind != "layer", pdl=pdl,
    )  # fmt: skip
    return y


def run(
    blocks: Blocks,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    act: str = "",
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    norm: str = "",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    after: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one of the kernels. Shapes: x and residual [T, *] with dense rows; weight [N, K] dense; y dense."""
    tokens, width = x.shape
    outputs = y.shape[-1]
    if y.numel() == 0:
        return
    padded = max(triton.next_power_of_2(tokens), 8 if blocks.way == "dot" else 1)
    options: dict[str, Any] = {} if blocks.way == "held" else {"TP": padded}
    if blocks.stages:
        options["num_stages"] = blocks.stages
    KERNELS[blocks.way][(triton.cdiv(outputs, blocks.rows),)](
        x, weight, y,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        x if norm_bias is None else norm_bias,
        x.stride(0), 0 if residual is None else residual.stride(0), outputs, width, alpha, beta, eps,
        ACT=act, HAS_BIAS=bias is not None, ADD=residual is not None, NORM=norm, AFTER=after, PLUS_ONE=plus_one,
        HAS_NW=norm_weight is not None, HAS_NB=norm_bias is not None, T=tokens,
        BN=blocks.rows, BK=blocks.columns, PDL=pdl, num_warps=blocks.warps, **options, **launch_options(pdl),
    )  # fmt: skip


def _few_rows(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x as [T, K] with dense rows, None if that is too many of them or the weights are not dense."""
    if x.numel() > SKINNY_TOKENS * x.shape[-1] or not weight.is_contiguous():
        return None
    return _dense(x)


def _dense(x: Tensor) -> Tensor:
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])
