"""The Triton kernels of latent attention over pages; latent_attention_launch launches them.

All query heads of a token read the same keys, so a tile holds (query, head) rows of a sequence, one after the other: a
part of a query's heads, or several queries, as their number has it. A block of keys is loaded once and multiplied
twice: as keys, with all its channels, and as values, with those of the latent alone.

    attend    programs take turns at the tiles there are, and at the splits of their keys
    join      joins the splits of a tile, from what they left in the workspace

Decodes and chunks of prompts are the same work. What there is of it is found on the device, from q_starts and kv_lens,
so that a captured step serves any lengths: all keys that tiles sweep over are dealt out to ``most`` splits, each of
them at least ``least_keys`` long. So there are never more than ``most`` splits of tiles that are split at all, and that
is how much workspace they need.

With SELECT a tile holds heads of one token and sweeps over the places of the list that names its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.paged_attention_triton import CAUSAL, NOTHING, WHOLE, finish

SEQUENCES = tl.constexpr(128)
"""Sequences that a program looks at together."""
UNSPLIT = tl.constexpr(1 << 30)
"""More keys than any sequence has."""


@triton.jit
def _work(  # type: ignore[no-untyped-def]
    sequence, q_starts, kv_lens, num_rows, num_seqs, choices,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """Return how many tiles sequences have, and how many keys a tile of theirs sweeps over at most.

    The rows past the last sequence form one more, without keys.
    """
    first = tl.load(q_starts + sequence, mask=sequence <= num_seqs, other=0)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    keys = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count = tl.where(sequence <= num_seqs, end - first, 0)
    if SELECT:
        tiles = count * ((HEADS + BLOCK_M - 1) // BLOCK_M)
        keys = tl.minimum(keys, choices)
    else:
        tiles = tl.cdiv(count * HEADS, BLOCK_M)
        if WINDOW > 0:
            keys = tl.minimum(keys, WINDOW + (BLOCK_M - 1) // HEADS + 1)
    return tiles, keys


@triton.jit
def _share(  # type: ignore[no-untyped-def]
    q_starts, kv_lens, num_rows, num_seqs, choices, most, least_keys,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """Return of how many keys at least a split is made."""
    keys_in_all = tl.full((), 0, tl.int64)
    for start in range(0, num_seqs + 1, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        tiles, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, choices, HEADS, BLOCK_M, WINDOW, SELECT)
        keys_in_all += tl.sum(tiles.to(tl.int64) * keys, 0)
    return tl.maximum(tl.cdiv(keys_in_all, most), least_keys).to(tl.int32)


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    item, share, q_starts, kv_lens, num_rows, num_seqs, choices,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """Return (sequence of an item of work, its number among those of the sequence, splits in the workspace that belong
    to sequences before, items in all).

    An item is a split of a tile; with PARTS one of so many parts of a tile that is split.
    """
    sequence, first, places, items = 0, 0, 0, 0
    for start in range(0, num_seqs + 1, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        tiles, keys = _work(each, q_starts, kv_lens, num_rows, num_seqs, choices, HEADS, BLOCK_M, WINDOW, SELECT)
        splits = tl.maximum(keys // share, 1)
        amount = tiles * splits
        kept = tl.where(splits > 1, amount, 0)
        if PARTS > 0:
            amount = tl.where(splits > 1, tiles * PARTS, 0)
        upto = tl.cumsum(amount, 0) + items
        before = upto <= item
        sequence += tl.sum(before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(before, upto, 0), 0))
        places += tl.sum(tl.where(before, kept, 0), 0)
        items = tl.max(upto, 0)
    return sequence, item - first, places, items


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    tile, row, count, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, SELECT: tl.constexpr
):  # fmt: skip
    """Return (query in the sequence, head, whether it is one) of rows of a tile."""
    if SELECT:
        per_token: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        head = tile % per_token * BLOCK_M + row
        token = tile // per_token + row * 0
        inside = (head < HEADS) & (token < count)
    else:
        flat = tile * BLOCK_M + row
        token, head = flat // HEADS, flat % HEADS
        inside = token < count
    return token, head, inside


@triton.jit
def _sweep(  # type: ignore[no-untyped-def]
    qc, qr, top, total, acc, keys, pages, chosen, begin, lo, hi, at, scale,
    SEEN: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Take the keys lo .. hi - 1 into the tile, in blocks from ``begin`` on; WHOLE: they are all of these blocks."""
    log2e: tl.constexpr = 1.4426950408889634
    cc, cr = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    # Pages are looked up a block ahead, so that no block waits for its own look-up.
    ahead = begin + tl.arange(0, BLOCK_N)
    next_live = (ahead >= lo) & (ahead < hi)
    if SELECT:
        ahead = tl.load(chosen + ahead, mask=next_live, other=-1)
        next_live = ahead >= 0
    next_at = tl.where(next_live, ahead, 0)
    next_page = tl.load(pages + next_at // PAGE, mask=next_live, other=0)
    for start in range(begin, hi, BLOCK_N):
        live, t, page = next_live, next_at, next_page.to(tl.int64) * UNIT
        ahead = start + BLOCK_N + tl.arange(0, BLOCK_N)
        next_live = ahead < hi
        if SELECT:
            ahead = tl.load(chosen + ahead, mask=next_live, other=-1)
            next_live = ahead >= 0
        next_at = tl.where(next_live, ahead, 0)
        next_page = tl.load(pages + next_at // PAGE, mask=next_live, other=0)
        row = keys + (page + (t % PAGE) * K_DIM)[:, None]
        if SEEN != WHOLE:
            c = tl.load(row + cc[None, :], mask=live[:, None] & (cc < V_DIM)[None, :], other=0.0)
        elif V_DIM < BLOCK_C:
            c = tl.load(row + cc[None, :], mask=(cc < V_DIM)[None, :], other=0.0)
        else:
            c = tl.load(row + cc[None, :])
        if SEEN != WHOLE:
            r = tl.load(row + V_DIM + cr[None, :], mask=live[:, None] & (cr < K_DIM - V_DIM)[None, :], other=0.0)
        elif K_DIM - V_DIM < BLOCK_R:
            r = tl.load(row + V_DIM + cr[None, :], mask=(cr < K_DIM - V_DIM)[None, :], other=0.0)
        else:
            r = tl.load(row + V_DIM + cr[None, :])
        c, r = c.to(COMPUTE), r.to(COMPUTE)
        logit = tl.dot(qr, tl.trans(r), input_precision="ieee")
        logit = tl.dot(qc, tl.trans(c), logit, input_precision="ieee") * (scale * log2e)
        if SEEN != WHOLE:
            seen = live[None, :] & (t[None, :] <= at[:, None])
            if WINDOW > 0:
                seen &= at[:, None] - t[None, :] < WINDOW
            logit = tl.where(seen, logit, NOTHING)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        if SEEN != WHOLE:
            # A row that has seen no key yet has the same maximum as what is hidden from it.
            p = tl.where(seen, p, 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), c, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    sequence, tile, split, splits, place, q, out, partial, stats, arena, page_table, q_starts, kv_lens, layer_offset,
    sinks, select, choices, num_rows, num_seqs, q_stride, table_stride, select_stride, scale,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW: tl.constexpr, SELECT: tl.constexpr, FIXED: tl.constexpr, HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Do one split of one tile; it goes to ``place`` in the workspace where there are others."""
    first = tl.load(q_starts + sequence)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count = end - first
    row, cc, cr = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    token, head, inside = _rows(tile, row, count, HEADS, BLOCK_M, SELECT)
    earliest, latest = tl.min(token, 0), tl.minimum(tl.max(token, 0), count - 1)
    at = length - count + token
    q_at = q + ((first + token).to(tl.int64) * q_stride + head * K_DIM)[:, None]
    qc = tl.load(q_at + cc[None, :], mask=inside[:, None] & (cc < V_DIM)[None, :], other=0.0).to(COMPUTE)
    qr = tl.load(q_at + V_DIM + cr[None, :], mask=inside[:, None] & (cr < K_DIM - V_DIM)[None, :], other=0.0)
    qr = qr.to(COMPUTE)
    keys = arena + tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    pages = page_table + sequence.to(tl.int64) * table_stride
    chosen = select + (first + earliest).to(tl.int64) * select_stride
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    hi = tl.minimum(length - count + latest + 1, length)
    lo = 0
    if SELECT:
        hi = tl.minimum(hi, choices)
    elif WINDOW > 0:
        lo = tl.maximum(length - count + earliest - (WINDOW - 1), 0)
    # Blocks begin at multiples of their size, whoever looks at them.
    begin = lo // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(hi - begin, 0), splits), BLOCK_N) * BLOCK_N
    begin += split * share
    hi = tl.minimum(begin + share, hi)
    if WINDOW == 0 and not SELECT and not FIXED:
        whole = tl.maximum(length - count + earliest + 1, 0) // BLOCK_N * BLOCK_N
        whole = tl.maximum(tl.minimum(whole, hi // BLOCK_N * BLOCK_N), begin)
        top, total, acc = _sweep(
            qc, qr, top, total, acc, keys, pages, chosen, begin, begin, whole, at, scale, WHOLE, K_DIM, V_DIM, BLOCK_C,
            BLOCK_R, BLOCK_N, PAGE, UNIT, WINDOW, SELECT, COMPUTE,
        )  # fmt: skip
        begin = whole
    top, total, acc = _sweep(
        qc, qr, top, total, acc, keys, pages, chosen, begin, lo, hi, at, scale, CAUSAL, K_DIM, V_DIM, BLOCK_C, BLOCK_R,
        BLOCK_N, PAGE, UNIT, WINDOW, SELECT, COMPUTE,
    )  # fmt: skip
    result_inside = inside[:, None] & (cc < V_DIM)[None, :]
    if splits > 1:
        there = place.to(tl.int64) * BLOCK_M + row
        tl.store(partial + (there * V_DIM)[:, None] + cc[None, :], acc, mask=result_inside)
        tl.store(stats + there + place * BLOCK_M, top, mask=inside)
        tl.store(stats + there + (place + 1) * BLOCK_M, total, mask=inside)
    else:
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + (((first + token).to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cc[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=result_inside)


@triton.jit(do_not_specialize=["choices", "num_rows", "num_seqs", "most", "least_keys", "table_stride"])
def attend(  # type: ignore[no-untyped-def]
    q, out, partial, stats, arena, page_table, q_starts, kv_lens, layer_offset, sinks, select,
    choices, most, least_keys, num_rows, num_seqs, q_stride, table_stride, select_stride, scale,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr, FIXED: tl.constexpr,
    HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, that take turns at the work there is.

    FIXED: a row is computed alike in every step; needs SPLIT off.
    """
    share = UNSPLIT
    if SPLIT:
        share = _share(
            q_starts, kv_lens, num_rows, num_seqs, choices, most, least_keys, HEADS, BLOCK_M, WINDOW, SELECT
        )  # fmt: skip
    _, _, _, items = _find(
        -1, share, q_starts, kv_lens, num_rows, num_seqs, choices, 0, HEADS, BLOCK_M, WINDOW, SELECT
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        sequence, number, places, _ = _find(
            item, share, q_starts, kv_lens, num_rows, num_seqs, choices, 0, HEADS, BLOCK_M, WINDOW, SELECT
        )  # fmt: skip
        count, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, choices, HEADS, BLOCK_M, WINDOW, SELECT)
        splits = tl.maximum(keys // share, 1)
        # Neighbours share keys in the L2 cache; late queries, which see most keys, go first.
        tile, split = count - 1 - number % count, number // count
        _tile(
            sequence, tile, split, splits, places + number, q, out, partial, stats, arena, page_table, q_starts,
            kv_lens, layer_offset, sinks, select, choices, num_rows, num_seqs, q_stride, table_stride, select_stride,
            scale, HEADS, K_DIM, V_DIM, BLOCK_C, BLOCK_R, BLOCK_M, BLOCK_N, PAGE, UNIT, ALIGNMENT, WINDOW, SELECT,
            FIXED, HAS_SINKS, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["choices", "num_rows", "num_seqs", "most", "least_keys"])
def join(  # type: ignore[no-untyped-def]
    partial, stats, out, q_starts, kv_lens, sinks, choices, most, least_keys, num_rows, num_seqs,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SELECT: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, that take turns at ROWS rows and COLUMNS channels of the tiles that are split,
    SPLITS splits at a time.

    The other arguments are those of attend.
    """
    ACROSS: tl.constexpr = BLOCK_C // COLUMNS
    PARTS: tl.constexpr = BLOCK_M // ROWS * ACROSS
    share = _share(
        q_starts, kv_lens, num_rows, num_seqs, choices, most, least_keys, HEADS, BLOCK_M, WINDOW, SELECT
    )  # fmt: skip
    _, _, _, items = _find(
        -1, share, q_starts, kv_lens, num_rows, num_seqs, choices, PARTS, HEADS, BLOCK_M, WINDOW, SELECT
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        sequence, number, places, _ = _find(
            item, share, q_starts, kv_lens, num_rows, num_seqs, choices, PARTS, HEADS, BLOCK_M, WINDOW, SELECT
        )  # fmt: skip
        tiles, keys = _work(sequence, q_starts, kv_lens, num_rows, num_seqs, choices, HEADS, BLOCK_M, WINDOW, SELECT)
        splits = tl.maximum(keys // share, 1)
        first = tl.load(q_starts + sequence)
        count = tl.load(q_starts + sequence + 1) - first
        part, slot = number % PARTS, number // PARTS
        row, cc = part // ACROSS * ROWS + tl.arange(0, ROWS), part % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        token, head, inside = _rows(tiles - 1 - slot, row, count, HEADS, BLOCK_M, SELECT)
        top = tl.full((ROWS,), NOTHING, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            there = (places + split * tiles + slot).to(tl.int64)[:, None] * BLOCK_M
            live = (split < splits)[:, None] & inside[None, :]
            their_top = tl.load(stats + 2 * there + row[None, :], mask=live, other=NOTHING)
            their_total = tl.load(stats + 2 * there + BLOCK_M + row[None, :], mask=live, other=0.0)
            sums_at = partial + ((there + row[None, :]) * V_DIM)[:, :, None] + cc[None, None, :]
            sums = tl.load(sums_at, mask=live[:, :, None] & (cc < V_DIM)[None, None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(their_top, 0))
            weight, shrink = tl.exp2(their_top - new_top[None, :]), tl.exp2(top - new_top)
            total = total * shrink + tl.sum(their_total * weight, 0)
            acc = acc * shrink[:, None] + tl.sum(sums * weight[:, :, None], 0)
            top = new_top
        result = finish(top, total, acc, sinks, head, inside, HAS_SINKS)
        out_at = out + (((first + token).to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cc[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside[:, None] & (cc < V_DIM)[None, :])
