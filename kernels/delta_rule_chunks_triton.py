"""The Triton kernels of delta_rule over chunks of tokens, for prompts: products on the tensor cores.

With c the running sum of g inside a chunk and S the state before it (kernels/delta_rule.py derives it):

    T = (1 + beta * tril(K, -1))^-1          K[i, j] = sum_d k[i, d] k[j, d] exp(c[i, d] - c[j, d])
    u = T (beta * v) - (T (beta * k exp(c))) S
    out = (q exp(c)) S + tril(Q) u           Q likewise, of q and k
    S = exp(c[n]) S + (k exp(c[n] - c))' u

    prepare   a program per (chunk, head): all that needs no state, into a workspace, every chunk at once
    advance   a program per (sequence, head, block of value channels) takes its state through the chunks, in registers

Two phases, because nearly all depends on the chunk alone, and what is left to do one chunk after the other are four
small products, two of which wait for each other. One long prompt gives `advance` heads x blocks of programs, 128 for
32 heads of 128 channels, about as many as there are multiprocessors; states between chunks never go to memory. A third
phase for the outputs would need them there, for two products less in a row.

No exponent is above 0: decays are taken between a token and an earlier one. A sum of decays by channel does not split
into one factor a token without growing beyond fp32, so the chunk is cut into blocks of SUB tokens: between blocks both
factors are taken relative to the edge of the later one; inside of a block pairs are made one distance at a time.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.blocks_triton import LEAST_DECAY, find_chunk, find_sequence, rows_of, state_at

SUB = tl.constexpr(16)
"""Tokens of a block inside of a chunk."""


@triton.jit
def _rows(at, stride, r, d, mask, scale, L2NORM: tl.constexpr):
    """Return rows of keys or queries in fp32, times ``scale``, and what they were multiplied by."""
    x = tl.load(at + r[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.zeros_like(tl.sum(x, 1)) + scale
    if L2NORM:
        factor = factor * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
    return x * factor[:, None], factor


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + ``lower``, which is strictly lower triangular: [CHUNK, CHUNK].

    The blocks on the diagonal by substitution, all at once, row by row; what is left is nilpotent: of a series in it
    four terms are not zero. The same series for single rows would be exact too, but loses all digits where keys repeat.
    """
    BLOCKS: tl.constexpr = CHUNK // SUB
    i, r = tl.arange(0, CHUNK), tl.arange(0, SUB)
    same = (i // SUB)[:, None] == (i // SUB)[None, :]
    x = -tl.sum(tl.reshape(tl.where(same, lower, 0.0), (BLOCKS, SUB, BLOCKS, SUB)), 2)
    for n in range(2, SUB):
        this = (r == n)[None, :, None]
        row = tl.sum(tl.where(this, x, 0.0), 1)
        row += tl.sum(row[:, :, None] * x, 1)
        x = tl.where(this, row[:, None, :], x)
    wide = tl.reshape(tl.broadcast_to(x[:, :, None, :], (BLOCKS, SUB, BLOCKS, SUB)), (CHUNK, CHUNK))
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    diagonal = tl.where(same, wide, 0.0) + one
    m = tl.dot(diagonal, tl.where(same, 0.0, lower), input_precision=PRECISION)
    m2 = tl.dot(m, m, input_precision=PRECISION)
    series = one - m + m2 - tl.dot(m, m2, input_precision=PRECISION)
    return tl.dot(series, diagonal, input_precision=PRECISION)


@triton.jit
def _pairs_by_channel(
    keys, queries, factor, sums, k_at, g_at, d, r, left, K_DIM: tl.constexpr, k_stride, g_stride,
    CHUNK: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return K and Q for j <= i, with anything elsewhere in blocks on the diagonal: [CHUNK, CHUNK] each.

    ``k_at`` and ``g_at`` point at the chunk's first row, of ``left``; ``factor`` is what keys were multiplied by.
    """
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    span = tl.zeros_like(sums)
    for distance in range(SUB):
        row = r - distance
        inside = ((r % SUB >= distance) & (r < left))[:, None] & (d < K_DIM)[None, :]
        other = tl.load(k_at + row[:, None] * k_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
        weighed = other * tl.exp(span)
        here = row[:, None] == tl.arange(0, CHUNK)[None, :]
        kk = tl.where(here, tl.sum(keys * weighed, 1)[:, None], kk)
        qk = tl.where(here, tl.sum(queries * weighed, 1)[:, None], qk)
        step = tl.load(g_at + row[:, None] * g_stride + d[None, :], mask=inside, other=0.0)
        span += tl.maximum(step, LEAST_DECAY)
    kk = kk * factor[None, :]
    qk = qk * factor[None, :]
    for block in tl.static_range(1, CHUNK // SUB):
        edge = tl.sum(tl.where((r == block * SUB - 1)[:, None], sums, 0.0), 0)[None, :]
        later = tl.where((r // SUB == block)[:, None], tl.exp(tl.minimum(sums - edge, 0.0)), 0.0)
        before = tl.where((r < block * SUB)[:, None], tl.exp(tl.minimum(edge - sums, 0.0)), 0.0)
        right = tl.trans((keys * before).to(COMPUTE))
        kk += tl.dot((keys * later).to(COMPUTE), right, input_precision=PRECISION)
        qk += tl.dot((queries * later).to(COMPUTE), right, input_precision=PRECISION)
    return kk, qk


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def prepare(
    q, k, v, g, beta, queries, keys, reads, wants, pairs, fades, q_starts, kv_lens, num_rows, num_seqs,
    q_stride, k_stride, v_stride, g_stride, beta_stride, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (as many chunks as there can be, heads).

    Workspace, by row of the step: queries (q exp(c)), keys (k exp(c[n] - c)) and reads (T (beta k exp(c))) [T, H, Dk],
    wants (T (beta v)) [T, H, Dv], pairs (tril(Q)) [T, H, CHUNK]; by chunk: fades (exp(c[n])) [., H, Dk] or [., H].
    """
    head = tl.program_id(1)
    key_head = head // (HEADS // K_HEADS)
    item = tl.program_id(0)
    sequence, number, items = find_chunk(item, q_starts, kv_lens, num_rows, num_seqs, LEAST, CHUNK, False)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Not in turns: what a loop keeps from one chunk to the next takes registers that this needs.
    if item < items:
        begin = tl.load(q_starts + sequence)
        first = begin + number * CHUNK
        left = tl.load(q_starts + sequence + 1) - first
        r, d, c = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        live, top = r < left, first.to(tl.int64)
        wide = live[:, None] & (d < K_DIM)[None, :]
        k_at = k + top * k_stride + key_head * K_DIM
        q_at = q + top * q_stride + key_head * K_DIM
        key, factor = _rows(k_at, k_stride, r, d, wide, 1.0, L2NORM)
        query, _factor = _rows(q_at, q_stride, r, d, wide, scale, L2NORM)
        rate = tl.load(beta + (top + r) * beta_stride + head, mask=live, other=0.0)
        # Offsets inside of a chunk are 32 bits wide: registers are short here.
        at = top * HEADS + head
        by_key, by_value = (r * (HEADS * K_DIM))[:, None] + d[None, :], (r * (HEADS * V_DIM))[:, None] + c[None, :]
        slot = ((begin // CHUNK + sequence + number) * HEADS + head).to(tl.int64)
        kept = queries.dtype.element_ty
        if BY_CHANNEL:
            g_at = g + top * g_stride + head * K_DIM
            steps = tl.load(g_at + r[:, None] * g_stride + d[None, :], mask=wide, other=0.0)
            steps = tl.maximum(steps, LEAST_DECAY)
            sums, total = tl.cumsum(steps, 0), tl.sum(steps, 0)
            kk, qk = _pairs_by_channel(
                key, query, factor, sums, k_at, g_at, d, r, left, K_DIM, k_stride, g_stride, CHUNK, COMPUTE,
                PRECISION,
            )  # fmt: skip
            decay, rest = tl.exp(sums), tl.exp(tl.minimum(total[None, :] - sums, 0.0))
            tl.store(fades + slot * K_DIM + d, tl.exp(total), mask=d < K_DIM)
        else:
            steps = tl.maximum(tl.load(g + (top + r) * g_stride + head, mask=live, other=0.0), LEAST_DECAY)
            sums, total = tl.cumsum(steps, 0), tl.sum(steps, 0)
            between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
            right = tl.trans(key.to(COMPUTE))
            kk = tl.dot(key.to(COMPUTE), right, input_precision=PRECISION) * between
            qk = tl.dot(query.to(COMPUTE), right, input_precision=PRECISION) * between
            decay, rest = tl.exp(sums)[:, None], tl.exp(tl.minimum(total - sums, 0.0))[:, None]
            tl.store(fades + slot, tl.exp(total))
        tl.store(queries + at * K_DIM + by_key, (query * decay).to(kept), mask=wide)
        tl.store(keys + at * K_DIM + by_key, (key * rest).to(kept), mask=wide)
        qk = tl.where(r[:, None] >= r[None, :], qk, 0.0)
        tl.store(pairs + at * CHUNK + (r * (HEADS * CHUNK))[:, None] + r[None, :], qk.to(kept), mask=live[:, None])
        lower = tl.where(r[:, None] > r[None, :], kk * rate[:, None], 0.0)
        solve = _inverse(lower, CHUNK, PRECISION).to(COMPUTE)
        read = tl.dot(solve, (key * decay * rate[:, None]).to(COMPUTE), input_precision=PRECISION)
        tl.store(reads + at * K_DIM + by_key, read.to(kept), mask=wide)
        inside = live[:, None] & (c < V_DIM)[None, :]
        v_at = v + top * v_stride + head * V_DIM
        value = tl.load(v_at + r[:, None] * v_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        want = tl.dot(solve, (value * rate[:, None]).to(COMPUTE), input_precision=PRECISION)
        tl.store(wants + at * V_DIM + by_value, want.to(kept), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def advance(
    queries, keys, reads, wants, pairs, fades, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows,
    num_seqs, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of value channels, heads, any number of programs that take turns at the sequences)."""
    head = tl.program_id(1)
    r, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    by_key, by_value = (r * (HEADS * K_DIM))[:, None] + d[None, :], (r * (HEADS * V_DIM))[:, None] + c[None, :]
    by_pair = (r * (HEADS * CHUNK))[:, None] + r[None, :]
    _, ranks = find_sequence(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for rank in range(tl.program_id(2), ranks, tl.num_programs(2)):
        sequence, _others = find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, LEAST)
        first, end, _live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        inside = (d < K_DIM)[:, None] & (c < V_DIM)[None, :]
        at = state_at(memory, blocks, offset, sequence, 4) + head * (K_DIM * V_DIM)
        at = at + (d * V_DIM)[:, None] + c[None, :]
        state = tl.load(at, mask=inside & (d < tl.where(old, K_DIM, 0))[:, None], other=0.0)
        slot = first // CHUNK + sequence
        for number in tl.range(0, tl.cdiv(end - first, CHUNK), num_stages=STAGES):
            top = (first + number * CHUNK).to(tl.int64) * HEADS + head
            live = r < end - first - number * CHUNK
            wide, tall = live[:, None] & (d < K_DIM)[None, :], live[:, None] & (c < V_DIM)[None, :]
            now = state.to(COMPUTE)
            read = tl.load(reads + top * K_DIM + by_key, mask=wide, other=0.0).to(COMPUTE)
            want = tl.load(wants + top * V_DIM + by_value, mask=tall, other=0.0).to(tl.float32)
            change = (want - tl.dot(read, now, input_precision=PRECISION)).to(COMPUTE)
            query = tl.load(queries + top * K_DIM + by_key, mask=wide, other=0.0).to(COMPUTE)
            result = tl.dot(query, now, input_precision=PRECISION)
            pair = tl.load(pairs + top * CHUNK + by_pair, mask=live[:, None], other=0.0).to(COMPUTE)
            result += tl.dot(pair, change, input_precision=PRECISION)
            tl.store(out + top * V_DIM + by_value, result.to(out.dtype.element_ty), mask=tall)
            chunk = ((slot + number) * HEADS + head).to(tl.int64)
            if BY_CHANNEL:
                state = state * tl.load(fades + chunk * K_DIM + d, mask=d < K_DIM, other=0.0)[:, None]
            else:
                state = state * tl.load(fades + chunk)
            key = tl.load(keys + top * K_DIM + by_key, mask=wide, other=0.0).to(COMPUTE)
            state += tl.dot(tl.trans(key), change, input_precision=PRECISION)
        tl.store(at, state, mask=inside)
