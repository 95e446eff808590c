"""The Triton kernel of prefill over pages: tiles of queries, long histories split; paged_attention_launch launches it.

    prefill   a program per (tile of queries, kv head, split of the keys), or programs that take turns at them
    join      joins the splits of a tile, from what they left in the workspace

A short chunk of a long prompt has few tiles, and each would sweep over all the keys before it, alone on most of the
device. What tiles there are, and how often their keys are split, is found on the device, from q_starts and kv_lens:
all keys that tiles sweep over are dealt out to ``most`` splits, each of them at least ``least_keys`` long. So there are
never more than ``most`` splits of tiles that are split at all, and that is how much workspace they need.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.paged_attention_triton import CAUSAL, NOTHING, WHOLE, finish, slope_of, sweep

SEQUENCES = tl.constexpr(128)
"""Sequences that a program looks at together."""
UNSPLIT = tl.constexpr(1 << 30)
"""More keys than any sequence has."""


@triton.jit
def _work(  # type: ignore[no-untyped-def]
    sequence, q_starts, kv_lens, num_rows, num_seqs, LEAST: tl.constexpr, TOKENS: tl.constexpr, REACH: tl.constexpr
):  # fmt: skip
    """Return how many tiles sequences have, and how many keys a tile of theirs sweeps over at most; a query sees REACH.

    The rows past the last sequence form one more, without keys. Sequences with fewer than LEAST queries have no tile.
    """
    first = tl.load(q_starts + sequence, mask=sequence <= num_seqs, other=0)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    keys = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count = end - first
    mine = (sequence == num_seqs) | ((sequence < num_seqs) & (count >= LEAST))
    if REACH > 0:
        keys = tl.minimum(keys, TOKENS + REACH - 1)
    return tl.where(mine, tl.cdiv(count, TOKENS), 0), keys


@triton.jit
def _share(  # type: ignore[no-untyped-def]
    q_starts, kv_lens, num_rows, num_seqs, most, least_keys,
    KV_HEADS: tl.constexpr, LEAST: tl.constexpr, TOKENS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Return of how many keys at least a split is made."""
    keys_in_all = tl.full((), 0, tl.int64)
    for start in range(0, num_seqs + 1, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        tiles, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, LEAST, TOKENS, REACH)
        keys_in_all += tl.sum(tiles.to(tl.int64) * keys, 0)
    return tl.maximum(tl.cdiv(keys_in_all * KV_HEADS, most), least_keys).to(tl.int32)


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    item, share, q_starts, kv_lens, num_rows, num_seqs,
    PARTS: tl.constexpr, KV_HEADS: tl.constexpr, LEAST: tl.constexpr, TOKENS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Return (sequence of an item of work, its number among those of the sequence, splits in the workspace that belong
    to sequences before, items in all).

    An item is a split of a tile; with PARTS one of so many parts of a tile that is split.
    """
    sequence, first, places, items = 0, 0, 0, 0
    for start in range(0, num_seqs + 1, SEQUENCES):
        tiles, keys = _work(
            start + tl.arange(0, SEQUENCES), q_starts, kv_lens, num_rows, num_seqs, LEAST, TOKENS, REACH
        )  # fmt: skip
        splits = tl.maximum(keys // share, 1)
        amount = tiles * splits * KV_HEADS
        kept = tl.where(splits > 1, amount, 0)
        if PARTS > 0:
            amount = tl.where(splits > 1, tiles * (KV_HEADS * PARTS), 0)
        upto = tl.cumsum(amount, 0) + items
        before = upto <= item
        sequence += tl.sum(before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(before, upto, 0), 0))
        places += tl.sum(tl.where(before, kept, 0), 0)
        items = tl.max(upto, 0)
    return sequence, item - first, places, items


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    sequence, tile, kv_head, split, splits, place, q, out, partial, stats, arena, page_table, q_starts, kv_lens,
    layer_offset, sinks, slopes, num_rows, num_seqs, q_stride, table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Do one split of one tile; it goes to ``place`` in the workspace where there are others."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    first = tl.load(q_starts + sequence)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count, begin = end - first, tile * TOKENS
    row, ck, cv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    token, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    inside = (row < TOKENS * GROUP) & (token < count)
    at, slope = length - count + token, slope_of(slopes, head, inside, scale, ALIBI)
    q_at = q + ((first + token).to(tl.int64) * q_stride + head * K_DIM)[:, None] + ck[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & (ck < K_DIM)[None, :], other=0.0).to(COMPUTE)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    keys = arena + (offset + kv_head * (PAGE * K_DIM))
    values = arena + (offset + KV_HEADS * (PAGE * K_DIM) + kv_head * (PAGE * V_DIM))
    pages = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    hi = tl.minimum(length - count + begin + TOKENS, length)
    lo = 0
    if CHUNK > 0:
        lo = tl.maximum(length - count + begin, 0) // CHUNK * CHUNK
    if WINDOW > 0:
        lo = tl.maximum(length - count + begin - (WINDOW - 1), lo)
    share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), splits), BLOCK_N) * BLOCK_N
    lo += split * share
    hi = tl.minimum(lo + share, hi)
    if WINDOW == 0 and CHUNK == 0:
        whole = tl.maximum(length - count + begin + 1, 0) // BLOCK_N * BLOCK_N
        whole = tl.maximum(tl.minimum(whole, hi // BLOCK_N * BLOCK_N), lo)
        top, total, acc = sweep(
            queries, top, total, acc, keys, values, pages, lo, whole, at, slope, scale, WHOLE, K_DIM, V_DIM,
            BLOCK_K, BLOCK_V, BLOCK_N, PAGE, UNIT, WINDOW, CHUNK, SOFTCAP, ALIBI, COMPUTE,
        )  # fmt: skip
        lo = whole
    top, total, acc = sweep(
        queries, top, total, acc, keys, values, pages, lo, hi, at, slope, scale, CAUSAL, K_DIM, V_DIM, BLOCK_K,
        BLOCK_V, BLOCK_N, PAGE, UNIT, WINDOW, CHUNK, SOFTCAP, ALIBI, COMPUTE,
    )  # fmt: skip
    result_inside = inside[:, None] & (cv < V_DIM)[None, :]
    if splits > 1:
        there = place * BLOCK_M + row
        tl.store(partial + (there * V_DIM)[:, None] + cv[None, :], acc, mask=result_inside)
        tl.store(stats + there + place * BLOCK_M, top, mask=inside)
        tl.store(stats + there + (place + 1) * BLOCK_M, total, mask=inside)
    else:
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + (((first + token).to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=result_inside)


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "tiles", "most", "least_keys", "table_stride"])
def prefill(  # type: ignore[no-untyped-def]
    q, out, partial, stats, arena, page_table, q_starts, kv_lens, layer_offset, sinks, slopes,
    tiles, most, least_keys, num_rows, num_seqs, q_stride, table_stride, scale,
    WALK: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs that take turns at the work there is (WALK); else ``tiles`` x kv heads, unsplit.

    ``tiles`` are never too few: sequence s has those from q_starts[s] // TOKENS + s on, at most one too many.
    Sequences with fewer than LEAST queries are left to decode.
    """
    TOKENS: tl.constexpr = BLOCK_M // (HEADS // KV_HEADS)
    if WALK:
        share = UNSPLIT
        if SPLIT:
            share = _share(
                q_starts, kv_lens, num_rows, num_seqs, most, least_keys, KV_HEADS, LEAST, TOKENS, REACH
            )  # fmt: skip
        _, _, _, items = _find(
            -1, share, q_starts, kv_lens, num_rows, num_seqs, 0, KV_HEADS, LEAST, TOKENS, REACH
        )  # fmt: skip
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            sequence, number, places, _ = _find(
                item, share, q_starts, kv_lens, num_rows, num_seqs, 0, KV_HEADS, LEAST, TOKENS, REACH
            )  # fmt: skip
            count, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, LEAST, TOKENS, REACH)
            splits = tl.maximum(keys // share, 1)
            # Neighbours share a head's keys in the L2 cache; late queries, which see most keys, go first.
            tile, piece = count - 1 - number % count, number // count
            _tile(
                sequence, tile, piece // splits, piece % splits, splits, places + number, q, out, partial, stats,
                arena, page_table, q_starts, kv_lens, layer_offset, sinks, slopes, num_rows, num_seqs, q_stride,
                table_stride, scale, HEADS, KV_HEADS, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_M, BLOCK_N, PAGE, UNIT,
                ALIGNMENT, WINDOW, CHUNK, SOFTCAP, ALIBI, HAS_SINKS, COMPUTE,
            )  # fmt: skip
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        item = tl.program_id(0)
        tile = tiles - 1 - item % tiles
        sequence, above = num_seqs * 0, num_seqs + 1
        while above - sequence > 1:
            middle = (sequence + above) // 2
            if tl.load(q_starts + middle) // TOKENS + middle <= tile:
                sequence = middle
            else:
                above = middle
        tile -= tl.load(q_starts + sequence) // TOKENS + sequence
        count, _ = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, LEAST, TOKENS, REACH)
        if tile < count:
            _tile(
                sequence, tile, item // tiles, 0, 1, 0, q, out, partial, stats, arena, page_table, q_starts, kv_lens,
                layer_offset, sinks, slopes, num_rows, num_seqs, q_stride, table_stride, scale, HEADS, KV_HEADS, K_DIM,
                V_DIM, BLOCK_K, BLOCK_V, BLOCK_M, BLOCK_N, PAGE, UNIT, ALIGNMENT, WINDOW, CHUNK, SOFTCAP, ALIBI,
                HAS_SINKS, COMPUTE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "most", "least_keys"])
def join(  # type: ignore[no-untyped-def]
    partial, stats, out, q_starts, kv_lens, sinks, most, least_keys, num_rows, num_seqs,
    LEAST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, REACH: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, that take turns at ROWS rows of the tiles that are split, SPLITS splits at a time.

    The other arguments are those of prefill.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    PARTS: tl.constexpr = BLOCK_M // ROWS
    share = _share(q_starts, kv_lens, num_rows, num_seqs, most, least_keys, KV_HEADS, LEAST, TOKENS, REACH)
    _, _, _, items = _find(
        -1, share, q_starts, kv_lens, num_rows, num_seqs, PARTS, KV_HEADS, LEAST, TOKENS, REACH
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        sequence, number, places, _ = _find(
            item, share, q_starts, kv_lens, num_rows, num_seqs, PARTS, KV_HEADS, LEAST, TOKENS, REACH
        )  # fmt: skip
        tiles, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, LEAST, TOKENS, REACH)
        splits = tl.maximum(keys // share, 1)
        first = tl.load(q_starts + sequence)
        count = tl.load(q_starts + sequence + 1) - first
        row, cv = number % PARTS * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
        slot, kv_head = number // PARTS % tiles, number // PARTS // tiles
        token, head = (tiles - 1 - slot) * TOKENS + row // GROUP, kv_head * GROUP + row % GROUP
        inside = (row < TOKENS * GROUP) & (token < count)
        top = tl.full((ROWS,), NOTHING, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for start in range(0, splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            there = (places + (kv_head * splits + split) * tiles + slot)[:, None] * BLOCK_M
            live = (split < splits)[:, None] & inside[None, :]
            their_top = tl.load(stats + 2 * there + row[None, :], mask=live, other=NOTHING)
            their_total = tl.load(stats + 2 * there + BLOCK_M + row[None, :], mask=live, other=0.0)
            part_at = partial + ((there + row[None, :]) * V_DIM)[:, :, None] + cv[None, None, :]
            part = tl.load(part_at, mask=live[:, :, None] & (cv < V_DIM)[None, None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(their_top, 0))
            weight, shrink = tl.exp2(their_top - new_top[None, :]), tl.exp2(top - new_top)
            total = total * shrink + tl.sum(their_total * weight, 0)
            acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
            top = new_top
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + (((first + token).to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside[:, None] & (cv < V_DIM)[None, :])
