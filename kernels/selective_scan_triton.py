"""The Triton kernels of selective_scan: every channel and state of it has a decay of its own, so there is no product.

    steps     a program per (sequence, block of channels): its rows of the state are read and written once

A long prompt is cut into segments of SEGMENT tokens, so that it fills the device:

    begin     a program per (segment, block of channels): the results of a sequence's first segment; of the others what
              they add to a state of zeros, and the sum of dt, which says how much of an older state is left
    join      a program per (sequence, block of channels): the state before each segment
    go on     as `begin`: the results of the segments but the first, and the state behind the last

What a token waits for of its predecessor is one multiplication and addition. All else can be under way before: inputs
are read some tokens at a time, and those of the next tokens while these are at work.
"""

# Triton's language has no types, nor have tuples that grow.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated, unreachable"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.recurrent_rows import SEGMENT, segment_slots
from treadle.kernels.blocks_native import rows_dense, whole
from treadle.kernels.blocks_triton import LOG2_E, arena, at_most, find_chunk, find_sequence, rows_of, state_at, turns

LEAST = 64
"""Sequences of fewer tokens go token by token, in one piece."""
STEP_CHANNELS, CHANNELS = 128, 32
"""Channels of a program of `steps`, and of the others."""
TOGETHER = 4
"""Tokens of a segment that are read together."""


@triton.jit
def _inputs(
    x, dt, b, c, t, left, i, n, x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Return (dt, x, B, C) of TOGETHER tokens from ``t`` on, one after the other; zeros where not so many are left."""
    rows = ()
    for count in tl.static_range(TOGETHER):
        row = t + count
        some, states = i < tl.where(count < left, CHANNELS, 0), n < tl.where(count < left, SIZE, 0)
        key = tl.load(b + row * b_stride + n, mask=states, other=0.0)
        query = key
        if RESULTS:
            query = tl.load(c + row * c_stride + n, mask=states, other=0.0)
        step = tl.load(dt + row * dt_stride + i, mask=some, other=0.0)
        rows += (step, tl.load(x + row * x_stride + i, mask=some, other=0.0), key, query)
    return rows


@triton.jit
def _through(
    state, rate, fresh, first, steps, x, dt, b, c, skip, out, x_stride, dt_stride, b_stride, c_stride, i, n,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, SKIP: tl.constexpr, TOGETHER: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Return the state behind ``steps`` rows, and the sums of dt; with RESULTS these are stored on the way.

    ``rate`` is the logarithm to base 2. If ``fresh``, the state is zero, whatever ``state`` is.
    """
    skipped = tl.zeros_like(tl.sum(state, 1))
    if SKIP:
        skipped = tl.load(skip + i, mask=i < CHANNELS, other=0.0)
    total = tl.zeros_like(skipped)
    top = first.to(tl.int64)
    following = _inputs(
        x, dt, b, c, top, steps, i, n, x_stride, dt_stride, b_stride, c_stride, CHANNELS, SIZE, TOGETHER, RESULTS
    )
    state = tl.where(fresh, 0.0, state)
    for done in range(0, steps, TOGETHER):
        rows = following
        following = _inputs(
            x, dt, b, c, top + done + TOGETHER, steps - done - TOGETHER, i, n, x_stride, dt_stride, b_stride, c_stride,
            CHANNELS, SIZE, TOGETHER, RESULTS,
        )  # fmt: skip
        for count in tl.static_range(TOGETHER):
            step, value = rows[4 * count], rows[4 * count + 1].to(tl.float32)
            key = rows[4 * count + 2].to(tl.float32)
            state = state * tl.exp2(step[:, None] * rate) + (value * step)[:, None] * key[None, :]
            total += step
            if RESULTS:
                result = tl.sum(state * rows[4 * count + 3].to(tl.float32)[None, :], 1) + skipped * value
                inside = i < tl.where(done + count < steps, CHANNELS, 0)
                tl.store(out + (top + done + count) * CHANNELS + i, result.to(out.dtype.element_ty), mask=inside)
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
    steps = tl.where(live, end - first, 0)
    if LEAST > 0:
        steps = tl.where(steps >= LEAST, 0, steps)
    dead = tl.where(live, 0, end - first)
    there = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
    inside = there & (i < tl.where(steps > 0, CHANNELS, 0))[:, None]
    cell = (i * SIZE)[:, None] + n[None, :]
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + cell
    # What a new sequence has here is read for nothing, so that no read waits for what says that it is new.
    state = tl.load(at, mask=inside, other=0.0)
    rate = tl.load(a + cell, mask=there, other=0.0) * LOG2_E
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    state, _ = _through(
        state, rate, old == 0, first, steps, x, dt, b, c, skip, out, x_stride, dt_stride, b_stride, c_stride, i, n,
        CHANNELS, SIZE, SKIP, 1, True,
    )  # fmt: skip
    tl.store(at, state, mask=inside)
    for count in range(dead):
        nothing = tl.zeros((BLOCK_I,), out.dtype.element_ty)
        tl.store(out + (first.to(tl.int64) + count) * CHANNELS + i, nothing, mask=i < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def selective_segments(
    x, dt, a, b, c, skip, out, states, totals, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
    LEAST: tl.constexpr, SEGMENT: tl.constexpr, TOGETHER: tl.constexpr, LATER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, programs that take turns at the segments): `begin`, or LATER `go on`.

    Workspace: states [., I, N] before every segment but a sequence's first, in the row that the segment's first token
    gives, and totals [., I], the sums of dt in the segment before.
    """
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    inside = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
    cell = (i * SIZE)[:, None] + n[None, :]
    rate = tl.load(a + cell, mask=inside, other=0.0) * LOG2_E
    _, _, items = find_chunk(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        sequence, number, _others = find_chunk(item, q_starts, kv_lens, num_rows, num_seqs, LEAST, SEGMENT, False)
        begin, end, _live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        first = begin + number * SEGMENT
        steps = tl.minimum(end - first, SEGMENT)
        at = state_at(memory, blocks, offset, sequence, 4)
        following = (first // SEGMENT).to(tl.int64)
        there = states + following * (CHANNELS * SIZE)
        results, before = number == 0, at
        if LATER:
            results, before = number > 0, there - CHANNELS * SIZE
        if results:
            state = tl.load(before + cell, mask=inside, other=0.0)
            state, _total = _through(
                state, rate, (old == 0) & (number == 0), first, steps, x, dt, b, c, skip, out, x_stride, dt_stride,
                b_stride, c_stride, i, n, CHANNELS, SIZE, SKIP, TOGETHER, True,
            )  # fmt: skip
            if first + steps == end:
                tl.store(at + cell, state, mask=inside)
            elif not LATER:
                tl.store(there + cell, state, mask=inside)
        elif not LATER:  # noqa: SIM102 - this is known when the kernel is compiled
            if first + steps < end:
                state, total = _through(
                    tl.zeros((BLOCK_I, BLOCK_N), tl.float32), rate, True, first, steps, x, dt, b, c, skip, out,
                    x_stride, dt_stride, b_stride, c_stride, i, n, CHANNELS, SIZE, False, TOGETHER, False,
                )  # fmt: skip
                tl.store(there + cell, state, mask=inside)
                tl.store(totals + following * CHANNELS + i, total, mask=i < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def join_segments(
    a, states, totals, q_starts, kv_lens, num_rows, num_seqs,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, programs that take turns at the sequences of several segments)."""
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    inside = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
    cell = (i * SIZE)[:, None] + n[None, :]
    rate = tl.load(a + cell, mask=inside, other=0.0) * LOG2_E
    _, ranks = find_sequence(-1, q_starts, kv_lens, num_rows, num_seqs, SEGMENT + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for rank in range(tl.program_id(1), ranks, tl.num_programs(1)):
        sequence, _others = find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, SEGMENT + 1)
        begin, end = tl.load(q_starts + sequence), tl.load(q_starts + sequence + 1)
        slot = (begin // SEGMENT).to(tl.int64)
        state = tl.load(states + slot * (CHANNELS * SIZE) + cell, mask=inside, other=0.0)
        for number in range(1, tl.cdiv(end - begin, SEGMENT) - 1):
            there = states + (slot + number) * (CHANNELS * SIZE) + cell
            total = tl.load(totals + (slot + number) * CHANNELS + i, mask=i < CHANNELS, other=0.0)
            state = state * tl.exp2(total[:, None] * rate) + tl.load(there, mask=inside, other=0.0)
            tl.store(there, state, mask=inside)


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
    skip = skips is not None
    sizes: dict[str, Any] = {
        "CHANNELS": channels,
        "SIZE": size,
        "BLOCK_N": triton.next_power_of_2(size),
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    if least:
        segments(inputs, state, strides, skip, least, sizes)
    selective_steps[(triton.cdiv(channels, STEP_CHANNELS), sequences + 1)](
        *inputs,
        *state,
        *strides,
        BLOCK_I=STEP_CHANNELS,
        SKIP=skip,
        LEAST=least,
        num_warps=min(max(sizes["BLOCK_N"] // 8, 1), 8),
        **sizes,
    )
    return out


def segments(
    inputs: tuple[Any, ...], state: tuple[Any, ...], strides: tuple[int, ...], skip: bool, least: int,
    sizes: dict[str, Any],
) -> None:  # fmt: skip
    """Launch the kernels for sequences of LEAST tokens or more."""
    x, rates = inputs[0], inputs[2]
    _, _, _, q_starts, _, kv_lens, tokens, sequences = state
    channels = sizes["CHANNELS"]
    slots, blocks = segment_slots(tokens), triton.cdiv(channels, CHANNELS)
    states = x.new_empty((slots, channels, sizes["SIZE"]), dtype=torch.float32)
    totals = x.new_empty((slots, channels), dtype=torch.float32)
    most = at_most(tokens, min(sequences, tokens // LEAST), SEGMENT)
    options = {**sizes, "BLOCK_I": CHANNELS, "SEGMENT": SEGMENT, "num_warps": min(max(sizes["BLOCK_N"] // 16, 1), 8)}
    for later in (False, True)[: 1 + (slots > 0)]:
        if later:
            longs = turns(min(sequences, tokens // SEGMENT), blocks, x.device)
            join_segments[(blocks, longs)](rates, states, totals, q_starts, kv_lens, tokens, sequences, **options)
        selective_segments[(blocks, min(most, 4 * tokens // SEGMENT + 1))](
            *inputs,
            states,
            totals,
            *state,
            *strides,
            SKIP=skip,
            LEAST=least,
            TOGETHER=TOGETHER,
            LATER=later,
            **options,
        )
