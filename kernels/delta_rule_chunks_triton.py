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
into one factor a token without growing beyond fp32, unless both are taken relative to a token between. So the chunk is
cut into halves, these again, and so on: each level gives the pairs across its cuts, relative to the last token before.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.blocks_triton import LEAST_DECAY, LOG2_E, find_chunk, find_sequence, rows_of, state_at

SUB = tl.constexpr(16)
"""Tokens of a block inside of a chunk."""


@triton.jit
def _rows(at, stride, r, d, mask, scale, L2NORM: tl.constexpr):
    """Return rows of keys or queries in fp32, times ``scale``."""
    x = tl.load(at + r[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if L2NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x * scale


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
def _decay(span, high, low, PRECISION: tl.constexpr):
    """Return exp2 of sums of steps by channel, which are in two parts: ``span`` [i, j] says whether i has step j."""
    span = span.to(high.dtype)
    return tl.exp2(tl.dot(span, high, tl.dot(span, low, input_precision=PRECISION), input_precision=PRECISION))


@triton.jit
def _pairs_by_channel(
    keys, queries, high, low, r, CHUNK: tl.constexpr, LEVELS: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return K for j < i and Q for j <= i, with anything elsewhere: [CHUNK, CHUNK] each."""
    apart = r[:, None] ^ r[None, :]
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32) + tl.sum(queries * keys, 1)[:, None]
    for level in range(LEVELS):
        # From the cut to a token behind it, or from behind a token to the cut.
        behind = ((r >> level) & 1)[:, None] == 1
        fade = _decay(((apart >> level) == 0) & ((r[None, :] <= r[:, None]) == behind), high, low, PRECISION)
        near, far = (keys * fade).to(COMPUTE), (queries * fade).to(COMPUTE)
        across = (apart >> level) == 1
        kk = tl.where(across, tl.dot(near, tl.trans(near), input_precision=PRECISION), kk)
        qk = tl.where(across, tl.dot(far, tl.trans(near), input_precision=PRECISION), qk)
    return kk, qk


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def prepare(
    q, k, v, g, beta, queries, keys, reads, wants, pairs, fades, q_starts, kv_lens, num_rows, num_seqs,
    q_stride, k_stride, v_stride, g_stride, beta_stride, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
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
        key = _rows(k_at, k_stride, r, d, wide, 1.0, L2NORM)
        query = _rows(q_at, q_stride, r, d, wide, scale, L2NORM)
        rate = tl.load(beta + (top + r) * beta_stride + head, mask=live, other=0.0)
        # Offsets inside of a chunk are 32 bits wide: registers are short here.
        at = top * HEADS + head
        by_key, by_value = (r * (HEADS * K_DIM))[:, None] + d[None, :], (r * (HEADS * V_DIM))[:, None] + c[None, :]
        slot = ((begin // CHUNK + sequence + number) * HEADS + head).to(tl.int64)
        kept = queries.dtype.element_ty
        if BY_CHANNEL:
            g_at = g + top * g_stride + head * K_DIM
            steps = tl.load(g_at + r[:, None] * g_stride + d[None, :], mask=wide, other=0.0)
            steps = tl.maximum(steps, LEAST_DECAY) * LOG2_E
            tl.store(fades + slot * K_DIM + d, tl.exp2(tl.sum(steps, 0)), mask=d < K_DIM)
            # Sums are products, with zeros and ones: they come in the layout of those that follow.
            high = steps.to(COMPUTE)
            low = (steps - high.to(tl.float32)).to(COMPUTE)
            decay = _decay(r[None, :] <= r[:, None], high, low, PRECISION)
            rest = _decay(r[None, :] > r[:, None], high, low, PRECISION)
        else:
            steps = tl.maximum(tl.load(g + (top + r) * g_stride + head, mask=live, other=0.0), LEAST_DECAY) * LOG2_E
            sums, total = tl.cumsum(steps, 0), tl.sum(steps, 0)
            decay, rest = tl.exp2(sums)[:, None], tl.exp2(tl.minimum(total - sums, 0.0))[:, None]
            tl.store(fades + slot, tl.exp2(total))
        tl.store(queries + at * K_DIM + by_key, (query * decay).to(kept), mask=wide)
        tl.store(keys + at * K_DIM + by_key, (key * rest).to(kept), mask=wide)
        faded = (key * decay * rate[:, None]).to(COMPUTE)
        if BY_CHANNEL:
            kk, qk = _pairs_by_channel(key, query, high, low, r, CHUNK, LEVELS, COMPUTE, PRECISION)
        else:
            between = tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0.0))
            right = tl.trans(key.to(COMPUTE))
            kk = tl.dot(key.to(COMPUTE), right, input_precision=PRECISION) * between
            qk = tl.dot(query.to(COMPUTE), right, input_precision=PRECISION) * between
        qk = tl.where(r[:, None] >= r[None, :], qk, 0.0)
        tl.store(pairs + at * CHUNK + (r * (HEADS * CHUNK))[:, None] + r[None, :], qk.to(kept), mask=live[:, None])
        lower = tl.where(r[:, None] > r[None, :], kk * rate[:, None], 0.0)
        solve = _inverse(lower, CHUNK, PRECISION).to(COMPUTE)
        read = tl.dot(solve, faded, input_precision=PRECISION)
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
