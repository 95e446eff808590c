"""Triton kernels of experts: a feed-forward of its own for every pair p = token * k + j, then sums over k.

    gate_up_vector, down_vector   for very few pairs, each product of one row by itself, bound by reading the weights;
                                  a program of the second reads its rows of all k experts of a token, and sums
    gate_up, down                 blocks of pairs of one expert on the tensor cores
    reduce                        the sum over j of the weighted outputs of pairs, j = 0 .. k-1 in this order, in fp32

A block's pairs come from ``experts_order_triton`` (ORDERED), or, where there are few pairs, every program looks for
those that share the expert of pair b, and leaves the work to the first of them. Ids outside 0 .. E-1 are no expert:
their pairs have outputs of 0. Which pairs share a block changes no result.

The first products and their activation are rounded to the dtype of x as the reference rounds them.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.activation_triton import apply, tanh


@triton.jit
def _activate(g, u, limit, alpha, beta, linear_beta, dtype: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr):
    """Return ``kernels.experts``' activation of fp32 values, first rounded to ``dtype``; an infinite limit is none."""
    g = g.to(dtype).to(tl.float32)
    if GATED:
        u = u.to(dtype).to(tl.float32)
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
        if ACT == "swiglu_oai":
            y = (u + 1.0) * (g * tl.sigmoid(g * alpha))
        elif ACT == "situ":
            y = beta * tanh(g / beta) * tl.sigmoid(g) * (linear_beta * tanh(u / linear_beta))
        else:
            y = apply(g, ACT).to(dtype).to(tl.float32) * u
    else:
        y = apply(g, ACT)
    return y


@triton.jit
def gate_up_vector(
    x, w, bias, ids, weights, h, x_stride, K, E, C, F, limit, alpha, beta, linear_beta,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, WHOLE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [P, F]; grid (blocks of F, P). WHOLE: BK columns are a row."""
    dtype: tl.constexpr = h.dtype.element_ty
    p = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.load(ids + p)
    if (e < 0) | (e >= E):
        return
    halves: tl.constexpr = 2 if GATED else 1
    gate = w + e.to(tl.int64) * F * halves * C
    up = gate + F * C
    row = x + (p // K).to(tl.int64) * x_stride
    at = n[:, None] * C + c[None, :]
    some = (n < F)[:, None]
    if WHOLE:
        mask = some & (c < C)[None, :]
        a = tl.load(gate + at, mask=mask, other=0.0, eviction_policy="evict_first")
        b = tl.load(up + at, mask=mask, other=0.0, eviction_policy="evict_first") if GATED else a
        v = tl.load(row + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        g = tl.sum(a.to(tl.float32) * v, 1)
        u = tl.sum(b.to(tl.float32) * v, 1) if GATED else g
    else:
        total = tl.zeros([BN, BK], tl.float32)
        second = total
        for start in range(0, C, BK):
            mask = some & (start + c < C)[None, :]
            a = tl.load(gate + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            v = tl.load(row + start + c, mask=start + c < C, other=0.0).to(tl.float32)[None, :]
            if GATED:
                b = tl.load(up + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
                second += b.to(tl.float32) * v
            total += a.to(tl.float32) * v
        g = tl.sum(total, 1)
        u = tl.sum(second, 1) if GATED else g
    if WEIGH:
        weight = tl.load(weights + p).to(tl.float32)
        g *= weight
        u *= weight
    if HAS_BIAS:
        own = bias + e.to(tl.int64) * F * halves + n
        g += tl.load(own, mask=n < F, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(own + F, mask=n < F, other=0.0).to(tl.float32)
    y = _activate(g, u, limit, alpha, beta, linear_beta, dtype, ACT, GATED)
    tl.store(h + p.to(tl.int64) * F + n, y.to(dtype), mask=n < F)


@triton.jit
def down_vector(
    h, w, bias, ids, weights, y, E, C, F,
    K: tl.constexpr, KP: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, WHOLE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, C]; grid (blocks of C, T). WHOLE: BK columns are a row."""
    dtype: tl.constexpr = y.dtype.element_ty
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    f = tl.arange(0, BK)
    j = tl.arange(0, KP)
    p = t * K + j
    # The kernel before waited for whatever made ids and weights, but this one's caches may hold what was there earlier.
    e = tl.load(ids + p, mask=j < K, other=-1, cache_modifier=".cg")
    there = (e >= 0) & (e < E)
    base = (tl.where(there, e, 0).to(tl.int64) * C * F)[:, None, None]
    at = (n[:, None] * F + f[None, :])[None, :, :]
    some = there[:, None, None] & (n < C)[None, :, None]
    mask = some & (f < F)[None, None, :]
    a = tl.load(w + base + at, mask=mask, other=0.0, eviction_policy="evict_first")
    weight = tl.load(weights + p, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    if WEIGH:
        weight = tl.where(there, 1.0, 0.0)
    o = tl.zeros([BN], tl.float32)
    if HAS_BIAS:
        own = bias + e.to(tl.int64)[:, None] * C + n[None, :]
        b = tl.load(own, mask=there[:, None] & (n < C)[None, :], other=0.0)
        o += tl.sum(b.to(tl.float32) * weight[:, None], 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = h + p.to(tl.int64)[:, None] * F + f[None, :]
    if WHOLE:
        v = tl.load(row, mask=there[:, None] & (f < F)[None, :], other=0.0).to(tl.float32) * weight[:, None]
        o += tl.sum(tl.sum(a.to(tl.float32) * v[:, None, :], 2), 0)
    else:
        total = tl.zeros([KP, BN, BK], tl.float32)
        for start in range(0, F, BK):
            v = tl.load(row + start, mask=there[:, None] & (start + f < F)[None, :], other=0.0).to(tl.float32)
            total += a.to(tl.float32) * (v * weight[:, None])[:, None, :]
            # one step ahead
            mask = some & (start + BK + f < F)[None, None, :]
            a = tl.load(w + base + at + start + BK, mask=mask, other=0.0, eviction_policy="evict_first")
        o += tl.sum(tl.sum(total, 2), 0)
    tl.store(y + t.to(tl.int64) * C + n, o.to(dtype), mask=n < C)


@triton.jit
def _tile(blocks, columns, ORDERED: tl.constexpr, GROUP: tl.constexpr):
    """Return which block of pairs and which of outputs a program takes.

    Programs that run at a time share weights (GROUP blocks of pairs that have mostly one expert), or rows.
    """
    program = tl.program_id(0)
    if ORDERED:
        width = GROUP * columns
        begin = program // width * GROUP
        size = tl.minimum(blocks - begin, GROUP)
        b = begin + program % width % size
        n = program % width // size
    else:
        b = program // columns
        n = program % columns
    return b, n


@triton.jit
def _sharing(ids, b, pairs, PP: tl.constexpr):
    """Return pair b's expert, all pairs q [PP], whether they share it, and whether one before b does."""
    q = tl.arange(0, PP)
    every = tl.load(ids + q, mask=q < pairs, other=-1, cache_modifier=".cg")
    e = tl.load(ids + b, cache_modifier=".cg")
    same = (every == e) & (q < pairs)
    return e, q, same, tl.max((same & (q < b)).to(tl.int32), 0)


@triton.jit
def _chosen(q, same, first, BM: tl.constexpr):
    """Return pairs number ``first`` to first + BM - 1 of those in ``same``, and which of these exist."""
    m = first + tl.arange(0, BM)
    rank = tl.where(same, tl.cumsum(same.to(tl.int32), 0) - 1, -1)
    rows = tl.sum(tl.where(rank[None, :] == m[:, None], q[None, :], 0), 1)
    return rows, m < tl.sum(same.to(tl.int32), 0)


@triton.jit
def _product(
    x, x_at, live, w, w_at, inside, K, SWAP: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr,
    BM: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return rows [BM, K] times weights [BW, K] transposed. SWAP: the matrix units take weights for rows."""
    k = tl.arange(0, BK)
    rows = x + x_at[:, None] + k[None, :]
    columns = w + w_at[:, None] + k[None, :]
    if SWAP:
        acc = tl.zeros([BW, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BW], tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            v = tl.load(rows, mask=live[:, None], other=0.0)
            a = tl.load(columns, mask=inside[:, None], other=0.0)
        else:
            left = (k < K - start)[None, :]
            v = tl.load(rows, mask=live[:, None] & left, other=0.0)
            a = tl.load(columns, mask=inside[:, None] & left, other=0.0)
        if SWAP:
            acc = tl.dot(a.to(COMPUTE), tl.trans(v.to(COMPUTE)), acc, input_precision="ieee")
        else:
            acc = tl.dot(v.to(COMPUTE), tl.trans(a.to(COMPUTE)), acc, input_precision="ieee")
        rows += BK
        columns += BK
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _gate_up_rows(
    x, w, bias, weights, h, rows, live, e, n, x_stride, K, C, F, limit, alpha, beta, linear_beta,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, SWAP: tl.constexpr,
    EVEN: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store outputs n [BN] of pairs ``rows`` [BM] of expert e. Gate and up rows lie in turns: g0 u0 g1 u1 ..."""
    dtype: tl.constexpr = h.dtype.element_ty
    halves: tl.constexpr = 2 if GATED else 1
    i = tl.arange(0, BN * halves)
    own = n * BN + i // halves
    at = own + i % halves * F
    base = e.to(tl.int64) * F * halves
    x_at = (rows // K).to(tl.int64) * x_stride
    o = _product(x, x_at, live, w + base * C, at * C, own < F, C, SWAP, EVEN, COMPUTE, BM, BN * halves, BK)
    if WEIGH:
        o *= tl.load(weights + rows, mask=live, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        o += tl.load(bias + base + at, mask=own < F, other=0.0).to(tl.float32)[None, :]
    if GATED:
        g, u = tl.split(tl.reshape(o, (BM, BN, 2)))
    else:
        g = o
        u = o
    y = _activate(g, u, limit, alpha, beta, linear_beta, dtype, ACT, GATED)
    n = n * BN + tl.arange(0, BN)
    tl.store(h + rows.to(tl.int64)[:, None] * F + n[None, :], y.to(dtype), mask=live[:, None] & (n < F)[None, :])


@triton.jit(do_not_specialize=["pairs", "blocks"])
def gate_up(
    x, w, bias, ids, weights, order, table, h, x_stride, pairs, K, blocks, E, C, F, limit, alpha, beta, linear_beta,
    ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, ORDERED: tl.constexpr,
    GROUP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [P, F]; grid: ``blocks`` of pairs times blocks of F."""
    b, n = _tile(blocks, tl.cdiv(F, BN), ORDERED, GROUP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ORDERED:
        e = tl.load(table + b * 3)
        m = tl.load(table + b * 3 + 1) + tl.arange(0, BM)
        end = tl.load(table + b * 3 + 2)
        if e >= E:
            return
        rows = tl.load(order + m, mask=m < end, other=0)
        _gate_up_rows(
            x, w, bias, weights, h, rows, m < end, e, n, x_stride, K, C, F, limit, alpha, beta, linear_beta,
            ACT, GATED, HAS_BIAS, WEIGH, SWAP, EVEN, COMPUTE, BM, BN, BK,
        )  # fmt: skip
    else:
        e, q, same, earlier = _sharing(ids, b, pairs, PP)
        if (e < 0) | (e >= E) | (earlier > 0):
            return
        for first in range(0, tl.sum(same.to(tl.int32), 0), BM):
            rows, live = _chosen(q, same, first, BM)
            _gate_up_rows(
                x, w, bias, weights, h, rows, live, e, n, x_stride, K, C, F, limit, alpha, beta, linear_beta,
                ACT, GATED, HAS_BIAS, WEIGH, SWAP, EVEN, COMPUTE, BM, BN, BK,
            )  # fmt: skip


@triton.jit
def _down_rows(
    h, w, bias, weights, out, rows, live, e, n, C, F,
    HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store outputs n [BN], weighted, of pairs ``rows`` [BM] of expert e."""
    n = n * BN + tl.arange(0, BN)
    base = e.to(tl.int64) * C
    h_at = rows.to(tl.int64) * F
    o = _product(h, h_at, live, w + base * F, n * F, n < C, F, SWAP, EVEN, COMPUTE, BM, BN, BK)
    if HAS_BIAS:
        o += tl.load(bias + base + n, mask=n < C, other=0.0).to(tl.float32)[None, :]
    if not WEIGH:
        o *= tl.load(weights + rows, mask=live, other=0.0).to(tl.float32)[:, None]
    at = rows.to(tl.int64)[:, None] * C + n[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=live[:, None] & (n < C)[None, :])


@triton.jit
def _nothing(out, rows, live, n, C, BM: tl.constexpr, BN: tl.constexpr):
    """Store outputs of 0 for pairs without an expert."""
    n = n * BN + tl.arange(0, BN)
    at = rows.to(tl.int64)[:, None] * C + n[None, :]
    zero = tl.zeros([BM, BN], out.dtype.element_ty)
    tl.store(out + at, zero, mask=live[:, None] & (n < C)[None, :])


@triton.jit(do_not_specialize=["pairs", "blocks"])
def down(
    h, w, bias, ids, weights, order, table, out, pairs, blocks, E, C, F,
    HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    EVEN: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [P, C]; grid: ``blocks`` of pairs times blocks of C."""
    b, n = _tile(blocks, tl.cdiv(C, BN), ORDERED, GROUP)
    if ORDERED:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        e = tl.load(table + b * 3)
        m = tl.load(table + b * 3 + 1) + tl.arange(0, BM)
        end = tl.load(table + b * 3 + 2)
        rows = tl.load(order + m, mask=m < end, other=0)
        if e >= E:
            _nothing(out, rows, m < end, n, C, BM, BN)
            return
        _down_rows(
            h, w, bias, weights, out, rows, m < end, e, n, C, F, HAS_BIAS, WEIGH, SWAP, EVEN, COMPUTE, BM, BN, BK
        )  # fmt: skip
    else:
        # ids are older than the kernel before, as in down_vector
        e, q, same, earlier = _sharing(ids, b, pairs, PP)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if (e < 0) | (e >= E):
            m = tl.arange(0, BM)
            _nothing(out, b + m, m < 1, n, C, BM, BN)
            return
        if earlier > 0:
            return
        for first in range(0, tl.sum(same.to(tl.int32), 0), BM):
            rows, live = _chosen(q, same, first, BM)
            _down_rows(
                h, w, bias, weights, out, rows, live, e, n, C, F, HAS_BIAS, WEIGH, SWAP, EVEN, COMPUTE, BM, BN, BK
            )  # fmt: skip


@triton.jit
def reduce(parts, y, C, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [T, C] from parts [T, K, C]; grid (blocks of C, T)."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    o = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        o += tl.load(parts + (t * K + j) * C + n, mask=n < C, other=0.0).to(tl.float32)
    tl.store(y + t * C + n, o.to(y.dtype.element_ty), mask=n < C)
