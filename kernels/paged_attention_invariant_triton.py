"""Triton kernels of attention over pages whose sums have one order for a query, in whatever step it is computed.

    attend   a program per (tile of queries, kv head), or per span of its keys as well
    join     joins the spans of a query, where programs shared them

Keys are taken in blocks, and added up from the start in spans, at multiples of their size in the sequence. A program
that takes all spans joins them one after the other by the very operations with which ``join`` does, each of them
rounded by itself (the launch forbids fusing); both ways run one binary, which makes the same reductions. What a query
does not see has weight 0 or, before the first key that it sees, is multiplied by 0 later: its neighbours in the tile,
and how many there are, change no bit.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.paged_attention_triton import NOTHING, finish


@triton.jit
def _first_seen(at, WINDOW: tl.constexpr):
    """Return the position of the first key that a query at ``at`` sees."""
    first = at * 0
    if WINDOW > 0:
        first = tl.maximum(at - (WINDOW - 1), 0)
    return first


@triton.jit
def _merge(top, total, acc, other_top, other_total, other_acc):
    """Join two softmaxes of the same rows: largest logits and sums [M], results [M, V]."""
    new_top = tl.maximum(top, other_top)
    ours, theirs = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
    total = total * ours + other_total * theirs
    acc = acc * ours[:, None] + other_acc * theirs[:, None]
    return new_top, total, acc


@triton.jit
def _span(
    q, keys, values, pages, lo, hi, first, at, bias, bias_at, inside, scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    EXTENT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the softmax over the keys lo .. hi - 1, of which those before ``first`` are not read.

    At ``bias_at`` [M] each row has what it adds to the logits of keys at distances below EXTENT; 0: nothing is added.
    """
    log2e: tl.constexpr = 1.4426950408889634
    ck, cv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # Pages are looked up a block ahead, so that no block waits for its own look-up.
    ahead = lo + tl.arange(0, BLOCK_N)
    next_page = tl.load(pages + ahead // PAGE, mask=(ahead >= first) & (ahead < hi), other=0)
    for start in range(lo, hi, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        there = (t >= first) & (t < hi)
        ahead = t + BLOCK_N
        page = next_page.to(tl.int64) * UNIT
        next_page = tl.load(pages + ahead // PAGE, mask=ahead < hi, other=0)
        k_at = keys + (page + (t % PAGE) * K_DIM)[:, None] + ck[None, :]
        v_at = values + (page + (t % PAGE) * V_DIM)[:, None] + cv[None, :]
        k = tl.load(k_at, mask=there[:, None] & (ck < K_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (cv < V_DIM)[None, :], other=0.0)
        logit = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee")
        if SOFTCAP > 0.0:
            x = logit * (scale / SOFTCAP)
            e = tl.exp2(tl.abs(x) * (-2.0 * log2e))
            tanh = (1.0 - e) / (1.0 + e)
            logit = tl.where(x < 0, -tanh, tanh) * (SOFTCAP * log2e)
        else:
            logit = logit * (scale * log2e)
        seen = t[None, :] <= at[:, None]
        if EXTENT > 0:
            distance = at[:, None] - t[None, :]
            near = inside[:, None] & seen & (distance < EXTENT)
            logit += tl.load(bias + (bias_at[:, None] + distance), mask=near, other=0.0).to(tl.float32) * log2e
        if WINDOW > 0:
            seen &= at[:, None] - t[None, :] < WINDOW
        logit = tl.where(seen, logit, NOTHING)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["tiles", "split", "most", "num_rows", "num_seqs", "table_stride"])
def attend(
    q, out, partial, stats, arena, page_table, q_starts, kv_lens, layer_offset, sinks, bias,
    tiles, split, most, num_rows, num_seqs, q_stride, table_stride, bias_stride, scale,
    SPAN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXTENT: tl.constexpr,
    HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, 1), or with ``split`` (tiles, kv heads, spans that a tile sees at most).

    Sequence s has the tiles from q_starts[s] // TOKENS + s on, at most one too many. A row's spans, counted from the
    first it sees, are left at [row, head, span] of ``partial``, of which it has ``most``.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tiles - 1 - tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, above = num_seqs * 0, num_seqs + 1
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if tl.load(q_starts + middle) // TOKENS + middle <= tile:
            sequence = middle
        else:
            above = middle
    first = tl.load(q_starts + sequence)
    begin = (tile - (first // TOKENS + sequence)) * TOKENS
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count = end - first
    if begin >= count:
        return
    row, ck, cv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    token, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    inside = (row < TOKENS * GROUP) & (token < count)
    at = length - count + token
    hi = tl.minimum(length - count + begin + TOKENS, length)
    seen = _first_seen(tl.maximum(length - count + begin, 0), WINDOW)
    span, spans = seen // SPAN, tl.cdiv(hi, SPAN)
    if split != 0:
        span += tl.program_id(2)
        spans = tl.minimum(spans, span + 1)
    q_at = q + ((first + token).to(tl.int64) * q_stride + head * K_DIM)[:, None] + ck[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & (ck < K_DIM)[None, :], other=0.0).to(COMPUTE)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    keys = arena + (offset + kv_head * (PAGE * K_DIM))
    values = arena + (offset + KV_HEADS * (PAGE * K_DIM) + kv_head * (PAGE * V_DIM))
    pages = page_table + sequence.to(tl.int64) * table_stride
    bias += (first + begin).to(tl.int64) * bias_stride
    bias_at = (row // GROUP) * bias_stride + head * EXTENT
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for each in range(span, spans):
        lo = each * SPAN
        # What lies before the first key that the tile sees is skipped by whole blocks.
        lo = tl.maximum(lo, seen // BLOCK_N * BLOCK_N)
        part_top, part_total, part = _span(
            queries, keys, values, pages, lo, tl.minimum((each + 1) * SPAN, hi), seen, at, bias, bias_at, inside,
            scale, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_M, BLOCK_N, PAGE, UNIT, WINDOW, SOFTCAP, EXTENT, COMPUTE,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    result_inside = inside[:, None] & (cv < V_DIM)[None, :]
    if split != 0:
        own = span - _first_seen(tl.maximum(at, 0), WINDOW) // SPAN
        kept = inside & (own >= 0) & (span + row * 0 < spans)
        place = ((first + token).to(tl.int64) * HEADS + head) * most + own
        tl.store(partial + (place * V_DIM)[:, None] + cv[None, :], acc, mask=kept[:, None] & (cv < V_DIM)[None, :])
        tl.store(stats + place * 2, top, mask=kept)
        tl.store(stats + place * 2 + 1, total, mask=kept)
    else:
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + (((first + token).to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=result_inside)


@triton.jit(do_not_specialize=["most", "num_seqs"])
def join(
    partial, stats, out, q_starts, kv_lens, sinks, most, num_seqs,
    SPAN: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, JOINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    one, number, cv = tl.arange(0, 1), tl.arange(0, JOINED), tl.arange(0, BLOCK_V)
    sequence, above = num_seqs * 0, num_seqs + 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if tl.load(q_starts + middle) <= row:
            sequence = middle
        else:
            above = middle
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=0)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    at = length - end + row
    # A row of no sequence, or of a stopped one, has no span.
    spans = tl.where(length > 0, at // SPAN + 1 - _first_seen(at, WINDOW) // SPAN, 0)
    top = tl.full((1,), NOTHING, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_V), tl.float32)
    first = (row.to(tl.int64) * HEADS + head) * most
    for start in range(0, spans, JOINED):
        place, live = first + start + number, start + number < spans
        tops = tl.load(stats + place * 2, mask=live, other=NOTHING)
        totals = tl.load(stats + place * 2 + 1, mask=live, other=0.0)
        parts_at = partial + (place * V_DIM)[:, None] + cv[None, :]
        parts = tl.load(parts_at, mask=live[:, None] & (cv < V_DIM)[None, :], other=0.0)
        for each in tl.static_range(JOINED):
            this = number == each
            part_top = tl.sum(tl.where(this, tops, 0.0), 0) + one * 0.0
            part_total = tl.sum(tl.where(this, totals, 0.0), 0) + one * 0.0
            part = tl.sum(tl.where(this[:, None], parts, 0.0), 0)[None, :]
            top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    result = finish(top, total, acc, sinks, head + one, one == 0, HAS_SINKS)
    out_at = out + ((row.to(tl.int64) * HEADS + head + one) * V_DIM)[:, None] + cv[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(cv < V_DIM)[None, :])
