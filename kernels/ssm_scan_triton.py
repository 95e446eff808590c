"""The Triton kernels of ssm_scan: token by token for short sequences, chunks on the tensor cores for long ones.

    steps     a program per (sequence, head, block of channels): its rows of the state are read and written once

A long prompt goes 64 tokens at a time through four products (kernels/ssm_scan.py derives them),

    out = exp(c) (C S') + M x + D x          M[i, j] = C[i] . B[j] exp(c[i] - c[j]) dt[j] for j <= i
    S   = exp(c[n]) S + (dt exp(c[n] - c) x)' B

and these chunks, one after the other, leave most of a device waiting. So it is cut into segments of SEGMENT tokens:

    begin     a program per (segment, head, block of channels): the results of a sequence's first segment; of the others
              what they add to a state of zeros, and the sum of the decays, by which older states have faded
    join      the state before each segment
    go on     as `begin`: the results of the segments but the first, and the state behind the last

With PDL the state of `steps` is read before a kernel waits for its predecessor, as in delta_rule_steps_triton.py.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.recurrent_rows import SEGMENT, chunk_tokens, segment_slots
from treadle.kernels.blocks_native import rows_dense, whole
from treadle.kernels.blocks_triton import (
    LEAST_DECAY,
    LOG2_E,
    arena,
    at_most,
    element,
    find_chunk,
    find_sequence,
    precision,
    rows_of,
    state_at,
)

LEAST = 16
"""Sequences of fewer tokens go token by token: a chunk takes as long however full it is."""
MANY_SEGMENTS = 2048
"""Programs of `begin` and `go on`: further segments take turns with these."""
JOINED = 1024
"""Numbers of a state that a program of `join` has."""
MANY_PROGRAMS = 512
"""From here on programs of `steps` may be large: there are enough to keep the memory of a device busy."""


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def ssm_steps(
    x, dt, a, b, c, skip, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, heads, sequences + 1): those of LEAST tokens or more, if it is not 0, are left out.

    The last is that of the rows past all sequences: they get zeros, as those of dead sequences do.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    p, n = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    steps = tl.where(live, end, first)
    if LEAST > 0:
        steps = tl.where(end - first >= LEAST, first, steps)
    dead = tl.where(live, first, end)
    inside = (p < tl.where(steps > first, DIM, 0))[:, None] & (n < SIZE)[None, :]
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + head * (DIM * SIZE)
    at = at + (p * SIZE)[:, None] + n[None, :]
    state = tl.load(at, mask=inside & (p < tl.where(old, DIM, 0))[:, None], other=0.0)
    rate = tl.load(a + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for count in range(steps - first):
        t = first.to(tl.int64) + count
        step = tl.load(dt + t * dt_stride + head)
        value = tl.load(x + t * x_stride + head * DIM + p, mask=p < DIM, other=0.0).to(tl.float32)
        key = tl.load(b + t * b_stride + group * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
        query = tl.load(c + t * c_stride + group * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + (value * step)[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], 1)
        if SKIP:
            result += tl.load(skip + head) * value
        tl.store(out + (t * HEADS + head) * DIM + p, result.to(out.dtype.element_ty), mask=p < DIM)
    tl.store(at, state, mask=inside)
    for count in range(dead - first):
        nothing = tl.zeros((BLOCK_P,), out.dtype.element_ty)
        tl.store(out + ((first.to(tl.int64) + count) * HEADS + head) * DIM + p, nothing, mask=p < DIM)


@triton.jit
def _through(
    state, rate, skipped, first, end, x, dt, b, c, out, head, p, n, x_stride, dt_stride, b_stride, c_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, RESULTS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the state [N, P] behind rows first to end, and the sum of decays; with RESULTS these are stored too."""
    r = tl.arange(0, CHUNK)
    group = head // (HEADS // GROUPS)
    b_at, c_at = b + group * SIZE, c + group * SIZE
    # Offsets inside of a chunk are 32 bits wide: registers are short here.
    by_b, by_c = (r * b_stride)[:, None] + n[None, :], (r * c_stride)[:, None] + n[None, :]
    by_x, by_out = (r * x_stride)[:, None] + p[None, :], (r * (HEADS * DIM))[:, None] + p[None, :]
    faded = 0.0
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        live, t = r < end - start, first.to(tl.int64) + (start - first)
        wide, tall = live[:, None] & (n < SIZE)[None, :], live[:, None] & (p < DIM)[None, :]
        step = tl.load(dt + t * dt_stride + head + r * dt_stride, mask=live, other=0.0)
        key = tl.load(b_at + t * b_stride + by_b, mask=wide, other=0.0).to(COMPUTE)
        value = tl.load(x + t * x_stride + head * DIM + by_x, mask=tall, other=0.0)
        decays = tl.maximum(step * rate, LEAST_DECAY * LOG2_E)
        sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        faded += total
        # exp2 of a sum less one of these: the decay from that token on, times its step.
        since = sums - tl.log2(tl.maximum(step, 1e-37))
        if RESULTS:
            query = tl.load(c_at + t * c_stride + by_c, mask=wide, other=0.0).to(COMPUTE)
            pair = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            between = tl.where(r[:, None] >= r[None, :], sums[:, None] - since[None, :], -200.0)
            pair = (pair * tl.exp2(between)).to(COMPUTE)
            result = tl.dot(query, state.to(COMPUTE), input_precision=PRECISION) * tl.exp2(sums)[:, None]
            result = tl.dot(pair, value.to(COMPUTE), result, input_precision=PRECISION)
            result += skipped * value.to(tl.float32)
            tl.store(out + (t * HEADS + head) * DIM + by_out, result.to(out.dtype.element_ty), mask=tall)
        added = (value.to(tl.float32) * tl.exp2(total - since)[:, None]).to(COMPUTE)
        state = tl.dot(tl.trans(key), added, state * tl.exp2(total), input_precision=PRECISION)
    return state, faded


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def ssm_segments(
    x, dt, a, b, c, skip, out, states, fades, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr, LEAST: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, LATER: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, heads, programs that take turns at the segments): `begin`, or with LATER `go on`.

    Workspace: states [., H, P, N] before every segment but a sequence's first, in the row that the segment's first
    token gives, and fades [., H], the sum of decays of the segment before.
    """
    head = tl.program_id(1)
    p, n = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    inside = (n < SIZE)[:, None] & (p < DIM)[None, :]
    cell = head * (DIM * SIZE) + (p * SIZE)[None, :] + n[:, None]
    rate = tl.load(a + head) * LOG2_E
    skipped = 0.0
    if SKIP:
        skipped = tl.load(skip + head)
    _, _, items = find_chunk(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(2), items, tl.num_programs(2)):
        sequence, number, _others = find_chunk(item, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
        begin, end, _live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        first = begin + number * SEGMENT
        upto = tl.minimum(first + SEGMENT, end)
        at = state_at(memory, blocks, offset, sequence, 4) + cell
        following = (first // SEGMENT).to(tl.int64)
        there = states + following * (HEADS * DIM * SIZE) + cell
        if LATER:
            if number > 0:
                state = tl.load(there - HEADS * DIM * SIZE, mask=inside, other=0.0)
                state, _faded = _through(
                    state, rate, skipped, first, upto, x, dt, b, c, out, head, p, n, x_stride, dt_stride, b_stride,
                    c_stride, HEADS, GROUPS, DIM, SIZE, CHUNK, STAGES, True, COMPUTE, PRECISION,
                )  # fmt: skip
                if upto == end:
                    tl.store(at, state, mask=inside)
        elif number == 0:
            state = tl.load(at, mask=inside & (n < tl.where(old, SIZE, 0))[:, None], other=0.0)
            state, _faded = _through(
                state, rate, skipped, first, upto, x, dt, b, c, out, head, p, n, x_stride, dt_stride, b_stride,
                c_stride, HEADS, GROUPS, DIM, SIZE, CHUNK, STAGES, True, COMPUTE, PRECISION,
            )  # fmt: skip
            if upto == end:
                tl.store(at, state, mask=inside)
            else:
                tl.store(there, state, mask=inside)
        elif upto < end:
            state, faded = _through(
                tl.zeros((BLOCK_N, BLOCK_P), tl.float32), rate, skipped, first, upto, x, dt, b, c, out, head, p, n,
                x_stride, dt_stride, b_stride, c_stride, HEADS, GROUPS, DIM, SIZE, CHUNK, STAGES, False, COMPUTE,
                PRECISION,
            )  # fmt: skip
            tl.store(there, state, mask=inside)
            tl.store(fades + following * HEADS + head, faded)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def ssm_join(
    states, fades, q_starts, kv_lens, num_rows, num_seqs,
    HEADS: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a head's CELLS, heads, programs that take turns at the sequences of several segments)."""
    head = tl.program_id(1)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, ranks = find_sequence(-1, q_starts, kv_lens, num_rows, num_seqs, SEGMENT + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for rank in range(tl.program_id(2), ranks, tl.num_programs(2)):
        sequence, _others = find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, SEGMENT + 1)
        begin, end = tl.load(q_starts + sequence), tl.load(q_starts + sequence + 1)
        state = tl.zeros((BLOCK,), tl.float32)
        fade = 0.0
        for number in range(1, tl.cdiv(end - begin, SEGMENT)):
            slot = (begin // SEGMENT + number - 1).to(tl.int64) * HEADS + head
            at = states + slot * CELLS + cell
            added = tl.load(at, mask=cell < CELLS, other=0.0)
            if number > 1:
                fade = tl.exp2(tl.load(fades + slot))
            state = state * fade + added
            tl.store(at, state, mask=cell < CELLS)


def ssm_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Return ``ssm_scan``'s result. Shapes: as the reference.

    ``invariant``: every token by itself, in blocks that do not depend on the step.
    """
    x, dt, B, C = (rows_dense(each) for each in (x, dt, B, C))
    rates, skips = whole(A), whole(D)
    (tokens, heads, dim), (groups, size), sequences = x.shape, B.shape[1:], kv_lens.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    inputs = (
        x, dt, rates, B, C, rates if skips is None else skips, out, arena(memory), blocks, offset, q_starts, positions,
        kv_lens, tokens, sequences, x.stride(0), dt.stride(0), B.stride(0), C.stride(0),
    )  # fmt: skip
    few = tokens <= sequences or tokens < LEAST
    least = 0 if invariant or few else LEAST
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    sizes: dict[str, Any] = {
        "HEADS": heads,
        "GROUPS": groups,
        "DIM": dim,
        "SIZE": size,
        "SKIP": skips is not None,
        "LEAST": least,
        "PDL": pdl,
        **options,
    }
    if least:
        segments(inputs, sizes, options)
    block_n, block_p = triton.next_power_of_2(size), triton.next_power_of_2(dim)
    tall = max(min(block_p, 4096 // block_n), 1)
    if not invariant and sequences * heads * triton.cdiv(dim, tall) < MANY_PROGRAMS:
        tall = max(min(tall, 2048 // block_n), 1)
    ssm_steps[(triton.cdiv(dim, tall), heads, sequences + 1)](
        *inputs, BLOCK_P=tall, BLOCK_N=block_n, num_warps=min(max(tall * block_n // 1024, 1), 8), **sizes
    )
    return out


def segments(inputs: tuple[Any, ...], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    """Launch the kernels for sequences of LEAST tokens or more."""
    x, (q_starts, _, kv_lens, tokens, sequences) = inputs[0], inputs[10:15]
    heads, dim, size = sizes["HEADS"], sizes["DIM"], sizes["SIZE"]
    block_n = max(triton.next_power_of_2(size), 16)
    exact = x.dtype is torch.float32
    wide = min(max(triton.next_power_of_2(dim), 16), 32 if exact else 64, max(8192 // block_n, 16))
    blocks, slots = triton.cdiv(dim, wide), segment_slots(tokens)
    most = at_most(tokens, min(sequences, tokens // LEAST), SEGMENT)
    states = x.new_empty((slots, heads, dim, size), dtype=torch.float32)
    fades = x.new_empty((slots, heads), dtype=torch.float32)
    for later in (False, True)[: 1 + (slots > 0)]:
        if later:
            ssm_join[(triton.cdiv(dim * size, JOINED), heads, min(sequences, tokens // SEGMENT))](
                states,
                fades,
                q_starts,
                kv_lens,
                tokens,
                sequences,
                HEADS=heads,
                CELLS=dim * size,
                BLOCK=JOINED,
                SEGMENT=SEGMENT,
                PDL=sizes["PDL"],
                num_warps=4,
                **options,
            )
        ssm_segments[(blocks, heads, min(most, triton.cdiv(MANY_SEGMENTS, blocks * heads)))](
            *inputs[:7],
            states,
            fades,
            *inputs[7:],
            BLOCK_P=wide,
            BLOCK_N=block_n,
            SEGMENT=SEGMENT,
            CHUNK=chunk_tokens(x.element_size()),
            STAGES=1 if exact else 2,
            LATER=later,
            COMPUTE=element(x.dtype),
            PRECISION=precision(x.dtype),
            num_warps=4,
            **sizes,
        )
