"""The Triton kernel of token_shift: a program has a few tokens of one sequence, for some of the channels.

The program of a sequence's first tokens takes the row that the step before left, then leaves the new one, which is in
x; no other program touches it. kernels/conv1d_triton.py does the same with longer tails.
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


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def shift_rows(
    x, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs, x_stride,
    CHANNELS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, ITEM: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1), BY_SEQUENCE, or (., as many runs of BLOCK_T tokens as there can be).

    Rows of nobody get zeros.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sequence, number = tl.program_id(1), 0
    if not BY_SEQUENCE:
        sequence, number, _ = find_chunk(sequence, q_starts, kv_lens, num_rows, num_seqs, 1, BLOCK_T, True)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if sequence <= num_seqs:
        first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        tail = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), ITEM) + channel
        keeps = (number == 0) & live
        before = tl.load(tail, mask=channel < tl.where(keeps & old, CHANNELS, 0), other=0.0)
        runs = number + 1
        if BY_SEQUENCE:
            runs = tl.cdiv(end - first, BLOCK_T)
        for run in range(number, runs):
            row = first + run * BLOCK_T + tl.arange(0, BLOCK_T)
            inside = (row < end)[:, None] & (channel < CHANNELS)[None, :]
            at = x + (row - 1).to(tl.int64)[:, None] * x_stride + channel[None, :]
            earlier = tl.load(at, mask=inside & (row > first)[:, None], other=0.0)
            result = tl.where((row == first)[:, None], before[None, :], earlier)
            result = tl.where(live, result, tl.zeros_like(result))
            tl.store(out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :], result, mask=inside)
        kept = channel < tl.where(keeps, CHANNELS, 0)
        last = tl.load(x + (end - 1).to(tl.int64) * x_stride + channel, mask=kept, other=0.0)
        tl.debug_barrier()
        tl.store(tail, last, mask=kept)


def token_shift(
    x: Tensor,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    *,
    pdl: bool = False,
    invariant: bool = False,  # noqa: ARG001  (rows are copied, however they are shared out)
) -> Tensor:
    """Return ``token_shift``'s result. Shapes: as the reference."""
    x = rows_dense(x)
    (tokens, channels), sequences = x.shape, kv_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    by_sequence = tokens <= sequences
    run = 1 if by_sequence else TOKENS
    # The rows past the last sequence count as one more.
    runs = sequences + 1 if by_sequence else at_most(tokens, sequences + 1, run)
    wide = min(triton.next_power_of_2(channels), CHANNELS)
    shift_rows[(triton.cdiv(channels, wide), runs)](
        x,
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
        BLOCK_T=run,
        BLOCK_C=wide,
        ITEM=x.element_size(),
        BY_SEQUENCE=by_sequence,
        PDL=pdl,
        num_warps=1 if run == 1 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
