"""The Triton kernel of cache_write, rope_cache_write and norm_rope_cache_write: one program for some heads of a token.

Every head is read once and written once: queries to the result, keys and values to their places in the arena. Products
are made in fp32 and rounded where the references round.

With PDL (programmatic dependent launch) the step's metadata, the angles and the norms' weights are read before the
kernel waits for its predecessor. That is safe because every kernel here lets its dependents start only after its own
wait: when a kernel runs, all kernels but its direct predecessor are complete, and the predecessor makes q, k and v.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.state import UNIT_BYTES
from treadle.kernels.cache_write import rows_contiguous

NORMS = {"rms": 1, "l2": 2, "layer": 3}
"""Kinds of norm as the kernel numbers them; 0 is none."""

FEW_TOKENS = 16
"""Up to here a program takes one head, so that a step of one token spreads over the device."""


@triton.jit
def _normed(x, inverse, weight, element: tl.constexpr, AFTER: tl.constexpr, PLUS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale fp32 channels by 1 / length and by the weight, rounded as kernels/norm.py does."""
    y = x * inverse
    if AFTER:
        y = y.to(element).to(tl.float32)
    if PLUS_ONE:
        weight = weight + 1.0
        if AFTER:
            weight = weight.to(element).to(tl.float32)
    return (y * weight).to(element).to(tl.float32)


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    x, y, y_stride, weight, weight_stride, cos, sin, first, heads,
    DIM: tl.constexpr, ROTATED: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr, AFTER: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm, turn and store up to BLOCK_HEADS of ``heads`` heads: h is read at x + h * DIM, written at y + h * y_stride.

    Channels are held in three parts: the two members of the rotated pairs, and the rest.
    """
    element: tl.constexpr = y.dtype.element_ty
    head = first + tl.arange(0, BLOCK_HEADS)
    row = (head < heads)[:, None]
    source, target = x + (head * DIM)[:, None], y + (head * y_stride)[:, None]
    scale = weight + (head * weight_stride)[:, None]
    half, rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    if INTERLEAVED:
        at_a, at_b = START + 2 * half, START + 2 * half + 1
    else:
        at_a, at_b = START + half, START + half + ROTATED // 2
    at_rest = rest if START > 0 else ROTATED + rest
    in_half, in_rest = row & (half < ROTATED // 2)[None, :], row & (rest < DIM - ROTATED)[None, :]
    a = tl.load(source + at_a[None, :], mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(source + at_b[None, :], mask=in_half, other=0.0).to(tl.float32)
    c = tl.load(source + at_rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if NORM > 0:
        if NORM == 3:
            mean = ((tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(c, 1)) / DIM)[:, None]
            a, b = tl.where(in_half, a - mean, 0.0), tl.where(in_half, b - mean, 0.0)
            c = tl.where(in_rest, c - mean, 0.0)
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        if NORM != 2:
            square = square / DIM
        inverse = tl.rsqrt(square + EPS)[:, None]
        if HAS_WEIGHT:
            wa = tl.load(scale + at_a[None, :], mask=in_half, other=0.0).to(tl.float32)
            wb = tl.load(scale + at_b[None, :], mask=in_half, other=0.0).to(tl.float32)
            wc = tl.load(scale + at_rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
            a = _normed(a, inverse, wa, element, AFTER, PLUS_ONE)
            b = _normed(b, inverse, wb, element, AFTER, PLUS_ONE)
            c = _normed(c, inverse, wc, element, AFTER, PLUS_ONE)
        else:
            a = (a * inverse).to(element).to(tl.float32)
            b = (b * inverse).to(element).to(tl.float32)
            c = (c * inverse).to(element).to(tl.float32)
    tl.store(target + at_a[None, :], (a * cos - b * sin).to(element), mask=in_half)
    tl.store(target + at_b[None, :], (b * cos + a * sin).to(element), mask=in_half)
    tl.store(target + at_rest[None, :], c.to(element), mask=in_rest)


@triton.jit(do_not_specialize=["table_stride"])
def write_heads(  # type: ignore[no-untyped-def]
    q, out, k, v, q_weight, k_weight, angles, arena, page_table, seq_ids, positions, layer_offset,
    q_stride, k_stride, v_stride, table_stride, q_weight_stride, k_weight_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROTATED: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr, NEGATED: tl.constexpr,
    NORM: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr,
    AFTER: tl.constexpr, UNIT: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, chunks of heads: those of the queries, then of the keys, then of the values)."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    live = position >= 0
    position = tl.maximum(position, 0)
    page = tl.load(page_table + tl.load(seq_ids + token) * table_stride + position // PAGE, mask=live, other=0)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    base = arena + (page.to(tl.int64) * UNIT + offset)
    within = position % PAGE
    stored = tl.where(live, KV_HEADS, 0)
    half = tl.arange(0, BLOCK_HALF)
    cos = tl.load(angles + position * ROTATED + half, mask=half < ROTATED // 2, other=0.0)[None, :]
    sin = tl.load(angles + position * ROTATED + ROTATED // 2 + half, mask=half < ROTATED // 2, other=0.0)[None, :]
    if NEGATED:
        sin = -sin
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_chunks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    k_chunks: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if chunk < q_chunks:
        _heads(
            q + token * q_stride, out + token * (HEADS * K_DIM), K_DIM, q_weight, q_weight_stride, cos, sin,
            chunk * BLOCK_HEADS, HEADS, K_DIM, ROTATED, START, INTERLEAVED, NORM, Q_WEIGHT, EPS, PLUS_ONE, AFTER,
            BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif chunk < q_chunks + k_chunks:
        _heads(
            k + token * k_stride, base + within * K_DIM, PAGE * K_DIM, k_weight, k_weight_stride, cos, sin,
            (chunk - q_chunks) * BLOCK_HEADS, stored, K_DIM, ROTATED, START, INTERLEAVED, NORM, K_WEIGHT, EPS,
            PLUS_ONE, AFTER, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = (chunk - q_chunks - k_chunks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        channel = tl.arange(0, BLOCK_V)
        inside = (head < stored)[:, None] & (channel < V_DIM)[None, :]
        value = tl.load(v + token * v_stride + (head * V_DIM)[:, None] + channel[None, :], mask=inside)
        target = base + (KV_HEADS * PAGE * K_DIM + within * V_DIM)
        tl.store(target + (head * (PAGE * V_DIM))[:, None] + channel[None, :], value, mask=inside)


def alignment(item_bytes: int, page_tokens: int, *dims: int) -> int:
    """Return how many elements every layer's offset and every row in a page are known to be a multiple of.

    16 bytes where they must be, so that rows are moved 16 bytes at a time: a layer's part of a page is a number of
    heads times ``page_tokens`` rows.
    """
    aligned = page_tokens * item_bytes % 16 == 0 and all(dim * item_bytes % 16 == 0 for dim in dims)
    return 16 // item_bytes if aligned else 1


def _write(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    kind: str = "",
    eps: float = 0.0,
    plus_one: bool = False,
    cast: str = "after",
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor | None:
    """Launch the kernel; None for ``q``, ``table`` or an empty ``kind`` leave that part out.

    ``invariant``: in blocks that do not depend on the number of tokens.
    """
    assert page_table.dtype is seq_ids.dtype is torch.int32
    assert positions.dtype is layer_offset.dtype is torch.int64
    k, v = rows_contiguous(k), rows_contiguous(v)
    tokens, kv_heads, k_dim = k.shape
    v_dim, item_bytes = v.shape[2], k.element_size()
    out = None
    if q is not None:
        q = rows_contiguous(q)
        out = torch.empty((tokens, q.shape[1], k_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    heads = 0 if q is None else q.shape[1]
    rotated = 0 if table is None else table.shape[1]
    few = tokens <= FEW_TOKENS and not invariant
    block_heads = 1 if few else min(8, triton.next_power_of_2(max(heads, kv_heads)))
    chunks = triton.cdiv(heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    write_heads[(tokens, chunks)](
        q if q is not None else k,
        out if out is not None else k,
        k,
        v,
        q_norm if q_norm is not None else k,
        k_norm if k_norm is not None else k,
        table.contiguous() if table is not None else layer_offset,
        arena.view(k.dtype),
        page_table,
        seq_ids,
        positions,
        layer_offset,
        q.stride(0) if q is not None else 0,
        k.stride(0),
        v.stride(0),
        page_table.stride(0),
        k_dim if q_norm is not None and q_norm.ndim > 1 else 0,
        k_dim if k_norm is not None and k_norm.ndim > 1 else 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        PAGE=page_tokens,
        ROTATED=rotated,
        START=0 if at == "head" else k_dim - rotated,
        INTERLEAVED=layout == "interleaved",
        NEGATED=layout == "half_neg",
        NORM=NORMS[kind] if kind else 0,
        Q_WEIGHT=q_norm is not None,
        K_WEIGHT=k_norm is not None,
        EPS=eps,
        PLUS_ONE=plus_one,
        AFTER=cast == "after" and kind != "layer",
        UNIT=UNIT_BYTES // item_bytes,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(max(rotated // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(k_dim - rotated, 1)),
        BLOCK_V=triton.next_power_of_2(v_dim),
        ALIGNMENT=alignment(item_bytes, page_tokens, k_dim, v_dim),
        PDL=pdl,
        num_warps=1 if block_heads == 1 else 4,
        **options,
    )
    return out


def cache_write(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> None:
    """Write ``k`` and ``v`` into the arena. Shapes: as the reference."""
    _write(
        None, k, v, None, arena, page_table, seq_ids, positions, layer_offset, page_tokens, pdl=pdl,
        invariant=invariant,
    )  # fmt: skip


def rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Write the rotated ``k`` and ``v``, return the rotated ``q``. Shapes: as the reference."""
    out = _write(
        q, k, v, table, arena, page_table, seq_ids, positions, layer_offset, page_tokens, layout, at, pdl=pdl,
        invariant=invariant,
    )  # fmt: skip
    assert out is not None
    return out


def norm_rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    cast: str = "after",
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Write the normed and rotated ``k`` and ``v``, return the normed and rotated ``q``. Shapes: as the reference."""
    out = _write(
        q, k, v, table, arena, page_table, seq_ids, positions, layer_offset, page_tokens, layout, at, q_norm, k_norm,
        kind, eps, plus_one, cast, pdl, invariant,
    )  # fmt: skip
    assert out is not None
    return out
