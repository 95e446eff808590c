"""The Triton kernels of selective_scan: every channel and state of it has a decay of its own, so there is no product.

    steps     a program per (sequence, block of channels): its rows of the state are read and written once

A long prompt is cut into segments of SEGMENT tokens, so that it fills the device:

    ends      a program per (segment, block of channels): what the segment adds to a state of zeros, and the sum of dt,
              which says how much of an older state is left
    join      a program per (sequence, block of channels): the state before each segment
    scan      as `ends`, from the right state: the results, and the state behind the last segment

Every token is thus taken twice; taken once, it would wait for all before it, on as many programs as there are blocks.
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

from treadle.graph.recurrent_rows import SEGMENT
from treadle.kernels.blocks_native import rows_dense, whole
from treadle.kernels.blocks_triton import arena, at_most, find_chunk, find_sequence, rows_of, state_at, turns

LEAST = 64
"""Sequences of fewer tokens go token by token, in one piece."""
CHANNELS = 32
"""Channels of a program."""


@triton.jit
def _through(
    state, rate, first, end, x, dt, b, c, skip, out, x_stride, dt_stride, b_stride, c_stride, i, n,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, SKIP: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Return the state behind rows first to end, and the sums of dt; with RESULTS these are stored on the way."""
    total = tl.zeros_like(tl.sum(state, 1))
    for count in range(end - first):
        t = first.to(tl.int64) + count
        step = tl.load(dt + t * dt_stride + i, mask=i < CHANNELS, other=0.0)
        value = tl.load(x + t * x_stride + i, mask=i < CHANNELS, other=0.0).to(tl.float32)
        key = tl.load(b + t * b_stride + n, mask=n < SIZE, other=0.0).to(tl.float32)
        state = state * tl.exp(step[:, None] * rate) + (value * step)[:, None] * key[None, :]
        total += step
        if RESULTS:
            query = tl.load(c + t * c_stride + n, mask=n < SIZE, other=0.0).to(tl.float32)
            result = tl.sum(state * query[None, :], 1)
            if SKIP:
                result += tl.load(skip + i, mask=i < CHANNELS, other=0.0) * value
            tl.store(out + t * CHANNELS + i, result.to(out.dtype.element_ty), mask=i < CHANNELS)
    return state, total


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def selective_steps(
    x, dt, a, b, c, skip, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1): those of LEAST tokens or more, if it is not 0, are left out.

    The last is that of the rows past all sequences: they get zeros, as those of dead sequences do.
    """
    sequence = tl.program_id(1)
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    steps = tl.where(live, end, first)
    if LEAST > 0:
        steps = tl.where(end - first >= LEAST, first, steps)
    dead = tl.where(live, first, end)
    there = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
    inside = there & (i < tl.where(steps > first, CHANNELS, 0))[:, None]
    cell = (i * SIZE)[:, None] + n[None, :]
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + cell
    state = tl.load(at, mask=inside & (i < tl.where(old, CHANNELS, 0))[:, None], other=0.0)
    rate = tl.load(a + cell, mask=there, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    state, _ = _through(
        state, rate, first, steps, x, dt, b, c, skip, out, x_stride, dt_stride, b_stride, c_stride, i, n, CHANNELS,
        SIZE, SKIP, True,
    )  # fmt: skip
    tl.store(at, state, mask=inside)
    for count in range(dead - first):
        nothing = tl.zeros((BLOCK_I,), out.dtype.element_ty)
        tl.store(out + (first.to(tl.int64) + count) * CHANNELS + i, nothing, mask=i < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def selective_segments(
    x, dt, a, b, c, skip, out, states, totals, memory, blocks, offset, q_starts, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
    LEAST: tl.constexpr, SEGMENT: tl.constexpr, RESULTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, programs that take turns at the segments): `ends`, or with RESULTS `scan`.

    Workspace, by segment: states [., I, N] and totals [., I].
    """
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    _, _, items = find_chunk(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        sequence, number, _others = find_chunk(item, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
        begin, end = tl.load(q_starts + sequence), tl.load(q_starts + sequence + 1)
        slot = (begin // SEGMENT + sequence + number).to(tl.int64)
        first = begin + number * SEGMENT
        upto = tl.minimum(first + SEGMENT, end)
        inside = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
        cell = (i * SIZE)[:, None] + n[None, :]
        there = states + slot * (CHANNELS * SIZE) + cell
        rate = tl.load(a + cell, mask=inside, other=0.0)
        if RESULTS:
            state = tl.load(there, mask=inside, other=0.0)
        else:
            state = tl.zeros((BLOCK_I, BLOCK_N), tl.float32)
        if RESULTS or upto < end:
            state, total = _through(
                state, rate, first, upto, x, dt, b, c, skip, out, x_stride, dt_stride, b_stride, c_stride, i, n,
                CHANNELS, SIZE, SKIP, RESULTS,
            )  # fmt: skip
            if RESULTS:
                last = inside & (i < tl.where(upto == end, CHANNELS, 0))[:, None]
                tl.store(state_at(memory, blocks, offset, sequence, 4) + cell, state, mask=last)
            else:
                tl.store(there, state, mask=inside)
                tl.store(totals + slot * CHANNELS + i, total, mask=i < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def join_segments(
    a, states, totals, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    SEGMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, programs that take turns at the sequences)."""
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    _, ranks = find_sequence(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for rank in range(tl.program_id(1), ranks, tl.num_programs(1)):
        sequence, _others = find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, LEAST)
        first, end, _live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        inside = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
        cell = (i * SIZE)[:, None] + n[None, :]
        rate = tl.load(a + cell, mask=inside, other=0.0)
        at = state_at(memory, blocks, offset, sequence, 4) + cell
        state = tl.load(at, mask=inside & (i < tl.where(old, CHANNELS, 0))[:, None], other=0.0)
        slot = (first // SEGMENT + sequence).to(tl.int64)
        segments = tl.cdiv(end - first, SEGMENT)
        for number in range(segments):
            there = states + (slot + number) * (CHANNELS * SIZE) + cell
            more = i < tl.where(number < segments - 1, CHANNELS, 0)
            added = tl.load(there, mask=inside & more[:, None], other=0.0)
            total = tl.load(totals + (slot + number) * CHANNELS + i, mask=more, other=0.0)
            tl.store(there, state, mask=inside)
            state = state * tl.exp(total[:, None] * rate) + added


def selective_scan(
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
    """Return ``selective_scan``'s result. Shapes: as the reference.

    ``invariant``: every sequence token by token.
    """
    x, dt, B, C = (rows_dense(each) for each in (x, dt, B, C))
    rates, skips = whole(A), whole(D)
    (tokens, channels), size, sequences = x.shape, B.shape[1], kv_lens.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    inputs = (x, dt, rates, B, C, x if skips is None else skips, out)
    state = (arena(memory), blocks, offset, q_starts, positions, kv_lens, tokens, sequences)
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0))
    least = 0 if invariant or tokens <= sequences or tokens < LEAST else LEAST
    sizes: dict[str, Any] = {
        "CHANNELS": channels,
        "SIZE": size,
        "BLOCK_I": CHANNELS,
        "BLOCK_N": triton.next_power_of_2(size),
        "LEAST": least,
        "PDL": pdl,
        "num_warps": min(max(CHANNELS * triton.next_power_of_2(size) // 512, 1), 8),
        **({"launch_pdl": True} if pdl else {}),
    }
    skip = skips is not None
    programs = triton.cdiv(channels, CHANNELS)
    if least:
        slots = tokens // SEGMENT + sequences
        states = torch.empty((slots, channels, size), dtype=torch.float32, device=x.device)
        totals = torch.empty((slots, channels), dtype=torch.float32, device=x.device)
        segments = min(at_most(tokens, sequences, SEGMENT), tokens // SEGMENT + 1)
        longs = turns(min(sequences, tokens // LEAST), programs, x.device)
        memory, _, _, _, _, *numbers = state
        given = (*inputs, states, totals, memory, blocks, offset, q_starts, *numbers, *strides)
        options = {"SEGMENT": SEGMENT, **sizes}
        selective_segments[(programs, segments)](*given, SKIP=skip, RESULTS=False, **options)
        join_segments[(programs, longs)](rates, states, totals, *state, **options)
        selective_segments[(programs, segments)](*given, SKIP=skip, RESULTS=True, **options)
    selective_steps[(programs, sequences + 1)](*inputs, *state, *strides, SKIP=skip, **sizes)
    return out
