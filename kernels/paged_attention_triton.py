"""Tiles of attention over pages in Triton, and the kernel of decode; paged_attention_launch launches it.

A tile holds rows (query, head) of the queries that share a kv head, and sweeps over blocks of keys with an online
softmax in base 2 (FlashAttention-2: Dao, https://arxiv.org/abs/2307.08691). Two kernels divide the work:

    decode    a program per (query, kv head, split of the keys); ``combine`` joins the splits
    prefill   a program per (tile of queries, kv head, split of the keys): paged_prefill_triton

Mixed steps run both: decode takes the sequences with one query.

Grids depend on the numbers of tokens and sequences only, never on lengths, so that captured graphs serve any lengths.

With PDL, decode reads a step's metadata, and keys and values of earlier steps, before it waits for its predecessor;
cache_write_triton says why that is safe.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOTHING = tl.constexpr(-1e30)
"""The logit of a key that is not seen; finite, so that a row without any key stays free of NaN."""

WHOLE, ENDS, CAUSAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What of a block of keys a tile sees: all of it; the keys before ``hi``; of those, each row what it may see."""


@triton.jit
def update(  # type: ignore[no-untyped-def]
    q, k, v, top, total, acc, t, hi, at, slope, scale,
    SEEN: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the running maximum, sum and result of the tile.

    t [N] positions of the keys, those from ``hi`` on are not there; at [M] positions of the queries (CAUSAL or ALIBI);
    slope [M] what a logit, before its scale, loses with distance (ALIBI).
    """
    log2e: tl.constexpr = 1.4426950408889634
    logit = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee")
    if ALIBI:
        logit += slope[:, None] * (t[None, :] - at[:, None]).to(tl.float32)
    if SOFTCAP > 0.0:
        x = logit * (scale / SOFTCAP)
        e = tl.exp2(tl.abs(x) * (-2.0 * log2e))
        tanh = (1.0 - e) / (1.0 + e)
        logit = tl.where(x < 0, -tanh, tanh) * (SOFTCAP * log2e)
        factor = 1.0
    else:
        factor = scale * log2e
    if SEEN != WHOLE:
        seen = (t < hi)[None, :]
        if SEEN == CAUSAL:
            seen &= t[None, :] <= at[:, None]
            if WINDOW > 0:
                seen &= at[:, None] - t[None, :] < WINDOW
            if CHUNK > 0:
                seen &= (at // CHUNK)[:, None] == (t // CHUNK)[None, :]
        logit = tl.where(seen, logit * factor, NOTHING)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(logit, 1) * factor)
        p = tl.exp2(logit * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def sweep(  # type: ignore[no-untyped-def]
    q, top, total, acc, keys, values, pages, lo, hi, at, slope, scale,
    SEEN: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Take the keys lo .. hi - 1 into the tile; WHOLE: they are a whole number of blocks."""
    ck, cv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    # Pages are looked up a block ahead, so that no block waits for its own look-up.
    ahead = lo + tl.arange(0, BLOCK_N)
    next_page = tl.load(pages + ahead // PAGE, mask=ahead < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        ahead = t + BLOCK_N
        page = next_page.to(tl.int64) * UNIT
        next_page = tl.load(pages + ahead // PAGE, mask=ahead < hi, other=0)
        k_at = keys + (page + (t % PAGE) * K_DIM)[:, None] + ck[None, :]
        v_at = values + (page + (t % PAGE) * V_DIM)[:, None] + cv[None, :]
        if SEEN != WHOLE:
            k = tl.load(k_at, mask=(t < hi)[:, None] & (ck < K_DIM)[None, :], other=0.0)
        elif K_DIM < BLOCK_K:
            k = tl.load(k_at, mask=(ck < K_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        if SEEN != WHOLE:
            v = tl.load(v_at, mask=(t < hi)[:, None] & (cv < V_DIM)[None, :], other=0.0)
        elif V_DIM < BLOCK_V:
            v = tl.load(v_at, mask=(cv < V_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        top, total, acc = update(
            q, k, v, top, total, acc, t, hi, at, slope, scale, SEEN, WINDOW, CHUNK, SOFTCAP, ALIBI, COMPUTE
        )  # fmt: skip
    return top, total, acc


@triton.jit
def slope_of(slopes, head, inside, scale, ALIBI: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what the logits of each row lose with distance, before their scale; zeros without ALIBI."""
    slope = tl.zeros(head.shape, tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=inside, other=0.0) / scale
    return slope


@triton.jit
def finish(top, total, acc, sinks, head, inside, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the result of rows whose keys are all taken: zeros where there were none."""
    log2e: tl.constexpr = 1.4426950408889634
    none = top <= 0.5 * NOTHING
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * log2e
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink[:, None]
    share = tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))
    return acc * share[:, None]


@triton.jit
def _owner(q_starts, row, num_seqs):  # type: ignore[no-untyped-def]
    """Return the sequence of a row of the flat batch; num_seqs for a row past the last sequence."""
    here = tl.load(q_starts + row, mask=row < num_seqs, other=-1)
    after = tl.load(q_starts + row + 1, mask=row < num_seqs, other=-1)
    # Found at once where each sequence has one row, else between ``sequence`` and ``above``.
    plain = (here == row) & (after == row + 1)
    sequence, above = tl.where(plain, row, 0), tl.where(plain, row + 1, num_seqs + 1)
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if tl.load(q_starts + middle) <= row:
            sequence = middle
        else:
            above = middle
    return sequence


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def decode(  # type: ignore[no-untyped-def]
    q, out, partial, stats, arena, page_table, q_starts, kv_lens, layer_offset, sinks, slopes,
    num_seqs, q_stride, table_stride, scale,
    BY_ROW: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows of the batch, kv heads, splits); without BY_ROW (sequences, kv heads, splits), of which those with one
    row count."""
    slot, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if BY_ROW:
        sequence = _owner(q_starts, slot, num_seqs)
    else:
        sequence = slot
    real = sequence < num_seqs
    first = tl.load(q_starts + sequence)
    count = tl.load(q_starts + sequence + 1, mask=real, other=0) - first
    length = tl.load(kv_lens + sequence, mask=real, other=0)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    keys = arena + (offset + kv_head * (PAGE * K_DIM))
    values = arena + (offset + KV_HEADS * (PAGE * K_DIM) + kv_head * (PAGE * V_DIM))
    pages = page_table + sequence.to(tl.int64) * table_stride
    if BY_ROW:
        row = slot
        hi = tl.minimum(length - count + (row - first) + 1, length)
        heads = GROUP
    else:
        row = first
        heads = tl.where(count == 1, GROUP, 0)
        hi = tl.where(count == 1, length, 0)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(hi - WINDOW, 0)
    if CHUNK > 0:
        lo = tl.maximum(tl.maximum(hi - 1, 0) // CHUNK * CHUNK, lo)
    last = hi - 1
    share = tl.cdiv(tl.cdiv(hi - lo, SPLITS), BLOCK_N) * BLOCK_N
    lo += split * share
    hi = tl.minimum(lo + share, hi)

    member, ck, cv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    head, inside = kv_head * GROUP + member, member < heads
    at, slope = last + member * 0, slope_of(slopes, head, inside, scale, ALIBI)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    q_at = q + (row.to(tl.int64) * q_stride + head * K_DIM)[:, None] + ck[None, :]
    q_inside = inside[:, None] & (ck < K_DIM)[None, :]
    if PREFETCH:
        # Keys of earlier steps now, those of this step when they are written.
        t = lo + tl.arange(0, BLOCK_N)
        page = tl.load(pages + t // PAGE, mask=t < hi, other=0).to(tl.int64) * UNIT
        k_at = keys + (page + (t % PAGE) * K_DIM)[:, None] + ck[None, :]
        v_at = values + (page + (t % PAGE) * V_DIM)[:, None] + cv[None, :]
        old = (t < tl.minimum(hi, length - count))[:, None]
        new = ((t < hi) & (t >= length - count))[:, None]
        k = tl.load(k_at, mask=old & (ck < K_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=old & (cv < V_DIM)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    queries = tl.load(q_at, mask=q_inside, other=0.0).to(COMPUTE)
    if PREFETCH:
        k = tl.load(k_at, mask=new & (ck < K_DIM)[None, :], other=k)
        v = tl.load(v_at, mask=new & (cv < V_DIM)[None, :], other=v)
        top, total, acc = update(
            queries, k, v, top, total, acc, t, hi, at, slope, scale, ENDS, WINDOW, CHUNK, SOFTCAP, ALIBI, COMPUTE
        )  # fmt: skip
        lo += BLOCK_N
    top, total, acc = sweep(
        queries, top, total, acc, keys, values, pages, lo, hi, at, slope, scale, ENDS, K_DIM, V_DIM, BLOCK_K, BLOCK_V,
        BLOCK_N, PAGE, UNIT, WINDOW, CHUNK, SOFTCAP, ALIBI, COMPUTE,
    )  # fmt: skip
    out_inside = inside[:, None] & (cv < V_DIM)[None, :]
    if SPLITS > 1:
        place = (slot.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(partial + (place * V_DIM)[:, None] + cv[None, :], acc, mask=out_inside)
        tl.store(stats + place * 2, top, mask=inside)
        tl.store(stats + place * 2 + 1, total, mask=inside)
    else:
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + ((row.to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=out_inside)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    partial, stats, out, q_starts, sinks,
    BY_ROW: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows or sequences, heads): join the splits that decode left."""
    slot, head = tl.program_id(0), tl.program_id(1)
    log2e: tl.constexpr = 1.4426950408889634
    if BY_ROW:
        row, splits = slot, SPLITS
    else:
        row = tl.load(q_starts + slot)
        splits = tl.where(tl.load(q_starts + slot + 1) - row == 1, SPLITS, 0)
    split, cv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    place = (slot.to(tl.int64) * HEADS + head) * SPLITS + split
    inside = (split < splits)[:, None] & (cv < V_DIM)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top = tl.load(stats + place * 2, mask=split < splits, other=NOTHING)
    total = tl.load(stats + place * 2 + 1, mask=split < splits, other=0.0)
    acc = tl.load(partial + (place * V_DIM)[:, None] + cv[None, :], mask=inside, other=0.0)
    highest = tl.max(top, 0)
    none = highest <= 0.5 * NOTHING
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * log2e
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    total = tl.sum(total * weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    result = tl.sum(acc * weight[:, None], 0) * tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))
    out_at = out + (row.to(tl.int64) * HEADS + head) * V_DIM + cv
    tl.store(out_at, result.to(out.dtype.element_ty), mask=cv < tl.where(splits > 0, V_DIM, 0))
