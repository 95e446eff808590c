"""The Triton kernel of conv1d: a program has a few tokens of one sequence, for some of the channels.

A sequence's first tokens need the tail that the step before left, and somebody must leave a new one. The program of the
first tokens does both: it reads the old tail, then stores the new, whose inputs are in x; no other program touches it.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.blocks_native import rows_dense
from treadle.kernels.blocks_triton import arena, at_most, find_chunk, rows_of, state_at

TOKENS, CHANNELS = 16, 128
"""Tokens and channels of a program. In a step of one token a sequence a program has a sequence, token by token."""


@triton.jit
def _rows(
    x, weight, start, out, tail, number, first, end, live, oldest, channel, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Store one run of tokens; their sums begin with ``start`` [1, channels]."""
    inside = (channel < CHANNELS)[None, :]
    row = first + number * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = (row < end)[:, None]
    y = start + tl.zeros((BLOCK_T, 1), tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + (tap - (TAPS - 1))
        within = (source >= first)[:, None]
        at = x + source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        now = tl.load(at, mask=inside & mine & within, other=0.0).to(tl.float32)
        place = tail + channel[None, :] * (TAPS - 1) + (source - first + (TAPS - 1))[:, None]
        kept = tl.load(place, mask=inside & mine & (source < oldest)[:, None], other=0.0).to(tl.float32)
        w = tl.load(weight + channel * TAPS + tap, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        y += w[None, :] * tl.where(within, now, kept)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    at = out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(at, tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=inside & mine)


@triton.jit
def _keep(x, tail, first, end, oldest, channel, x_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Store the new tail. Where a step has fewer tokens than it, the old one moves up: places are read, then stored."""
    inside = channel < CHANNELS
    for tap in tl.static_range(TAPS - 1):
        source = end - (TAPS - 1) + tap
        at = x + source.to(tl.int64) * x_stride + channel
        now = tl.load(at, mask=channel < tl.where(source >= first, CHANNELS, 0), other=0.0)
        place = tail + channel * (TAPS - 1) + (source - first + (TAPS - 1))
        kept = tl.load(place, mask=channel < tl.where(source < oldest, CHANNELS, 0), other=0.0)
        tl.debug_barrier()
        tl.store(tail + channel * (TAPS - 1) + tap, tl.where(source >= first, now, kept), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def convolve(
    x, weight, bias, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, ITEM: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1), BY_SEQUENCE, or (., as many runs of BLOCK_T tokens as there can be).

    Rows of nobody get zeros. A run must be at least as long as the tail.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sequence, number = tl.program_id(1), 0
    if not BY_SEQUENCE:
        sequence, number, _ = find_chunk(sequence, q_starts, kv_lens, num_rows, num_seqs, 1, BLOCK_T, True)
    start = tl.zeros((1, BLOCK_C), tl.float32)
    if HAS_BIAS:
        start += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if sequence <= num_seqs:
        first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        tail = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), ITEM)
        oldest = tl.where(live & old, first, -TAPS)  # rows before it are in the tail
        runs = number + 1
        if BY_SEQUENCE:
            runs = tl.cdiv(end - first, BLOCK_T)
        for run in range(number, runs):
            _rows(
                x, weight, start, out, tail, run, first, end, live, oldest, channel, x_stride, CHANNELS, TAPS, BLOCK_T,
                SILU,
            )  # fmt: skip
        if (number == 0) & live:
            _keep(x, tail, first, end, oldest, channel, x_stride, CHANNELS, TAPS)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    act: str = "none",
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Return ``conv1d``'s result. Shapes: as the reference.

    ``invariant``: in runs that do not depend on the step.
    """
    x, weight = rows_dense(x), weight.contiguous()
    (tokens, channels), taps, sequences = x.shape, weight.shape[1], kv_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    by_sequence = tokens <= sequences and not invariant
    run = 1 if by_sequence else max(TOKENS, triton.next_power_of_2(taps))
    # The rows past the last sequence count as one more.
    runs = sequences + 1 if by_sequence else at_most(tokens, sequences + 1, run)
    wide = min(triton.next_power_of_2(channels), CHANNELS)
    convolve[(triton.cdiv(channels, wide), runs)](
        x,
        weight,
        x if bias is None else bias.contiguous(),
        out,
        arena(memory, x.dtype),
        blocks,
        offset,
        q_starts,
        positions,
        kv_lens,
        tokens,
        sequences,
        x.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        BLOCK_T=run,
        BLOCK_C=wide,
        ITEM=x.element_size(),
        BY_SEQUENCE=by_sequence,
        HAS_BIAS=bias is not None,
        SILU=act == "silu",
        PDL=pdl,
        num_warps=1 if run == 1 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
