"""The Triton kernel of selective_scan: every channel and state of it has a decay of its own, so there is no product.

A program takes some channels of one sequence token by token, the state in registers, read and written once. What a token
waits for of its predecessor is one multiplication and addition; all else can be under way before. So inputs are read
TOGETHER tokens at a time, and those of the next while these are at work.
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

from treadle.kernels.blocks_native import rows_dense, whole
from treadle.kernels.blocks_triton import LOG2_E, arena, rows_of, state_at

LONG = (16, 8, 1)
"""Channels of a program, tokens that are read together, and warps, where sequences may be long."""
SHORT = (64, 1, 2)
"""The same in steps of one token a sequence."""
TURNS = 1


@triton.jit
def _inputs(
    x, dt, b, c, t, left, i, n, x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return (dt, x, B, C) of TOGETHER tokens from ``t`` on, one after the other; zeros where not so many are left."""
    rows = ()
    for count in tl.static_range(TOGETHER):
        row = t + count
        some, states = i < tl.where(count < left, CHANNELS, 0), n < tl.where(count < left, SIZE, 0)
        rows += (
            tl.load(dt + row * dt_stride + i, mask=some, other=0.0),
            tl.load(x + row * x_stride + i, mask=some, other=0.0),
            tl.load(b + row * b_stride + n, mask=states, other=0.0),
            tl.load(c + row * c_stride + n, mask=states, other=0.0),
        )
    return rows


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def selective_steps(
    x, dt, a, b, c, skip, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
    TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, programs that take turns at sequences + 1).

    The last is that of the rows past all sequences: they get zeros, as those of dead sequences do.
    """
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    there = (i < CHANNELS)[:, None] & (n < SIZE)[None, :]
    cell = (i * SIZE)[:, None] + n[None, :]
    rate = tl.load(a + cell, mask=there, other=0.0) * LOG2_E
    skipped = tl.zeros((BLOCK_I,), tl.float32)
    if SKIP:
        skipped = tl.load(skip + i, mask=i < CHANNELS, other=0.0)
    for sequence in range(tl.program_id(1), num_seqs + 1, tl.num_programs(1)):
        first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + cell
        # What a new sequence has here is read for nothing, so that no read waits for what says that it is new.
        state = tl.load(at, mask=there & (i < tl.where(live, CHANNELS, 0))[:, None], other=0.0)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        top, steps = first.to(tl.int64), tl.where(live, end - first, 0)
        following = _inputs(
            x, dt, b, c, top, steps, i, n, x_stride, dt_stride, b_stride, c_stride, CHANNELS, SIZE, TOGETHER
        )
        state = tl.where(old, state, 0.0)
        for done in range(0, steps, TOGETHER):
            rows = following
            following = _inputs(
                x, dt, b, c, top + done + TOGETHER, steps - done - TOGETHER, i, n, x_stride, dt_stride, b_stride,
                c_stride, CHANNELS, SIZE, TOGETHER,
            )  # fmt: skip
            for count in tl.static_range(TOGETHER):
                step, value = rows[4 * count], rows[4 * count + 1].to(tl.float32)
                key, query = rows[4 * count + 2].to(tl.float32), rows[4 * count + 3].to(tl.float32)
                state = state * tl.exp2(step[:, None] * rate) + (value * step)[:, None] * key[None, :]
                result = tl.sum(state * query[None, :], 1) + skipped * value
                inside = i < tl.where(done + count < steps, CHANNELS, 0)
                tl.store(out + (top + done + count) * CHANNELS + i, result.to(out.dtype.element_ty), mask=inside)
        tl.store(at, state, mask=there & (i < tl.where(live, CHANNELS, 0))[:, None])
        for count in range(tl.where(live, 0, end - first)):
            nothing = tl.zeros((BLOCK_I,), out.dtype.element_ty)
            tl.store(out + (top + count) * CHANNELS + i, nothing, mask=i < CHANNELS)


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

    ``invariant``: in programs that do not depend on the step.
    """
    x, dt, B, C = (rows_dense(each) for each in (x, dt, B, C))
    rates, skips = whole(A), whole(D)
    (tokens, channels), size, sequences = x.shape, B.shape[1], kv_lens.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    wide, together, warps = SHORT if tokens <= sequences and not invariant else LONG
    selective_steps[(triton.cdiv(channels, wide), triton.cdiv(sequences + 1, TURNS))](
        x,
        dt,
        rates,
        B,
        C,
        x if skips is None else skips,
        out,
        arena(memory),
        blocks,
        offset,
        q_starts,
        positions,
        kv_lens,
        tokens,
        sequences,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        CHANNELS=channels,
        SIZE=size,
        BLOCK_I=wide,
        BLOCK_N=triton.next_power_of_2(size),
        SKIP=skips is not None,
        TOGETHER=together,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
