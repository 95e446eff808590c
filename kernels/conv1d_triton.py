"""The Triton kernel of conv1d: a program takes a run of tokens of one sequence through a window of inputs in registers.

A sequence's first tokens need the tail that the step before left, and somebody must leave a new one. The program of the
first tokens does both: it reads the old tail, then stores the new, whose inputs are in x; no other program touches it.
"""

# Triton's language has no types, nor have tuples that grow.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.blocks_native import rows_dense
from treadle.kernels.blocks_triton import LOG2_E, arena, at_most, find_chunk, rows_of, state_at

TOKENS = 32
"""Tokens of a program. In a step of one token a sequence a program has a sequence, token by token."""
TOGETHER = 4
"""Tokens whose inputs are on their way together."""
CHANNELS = 512
"""Channels of a program."""


@triton.jit
def _taps(weight, channel, here, TAPS: tl.constexpr, WIDE: tl.constexpr):
    """Return the weights of each tap, [channels] fp32. They lie by channel: rows are read whole, then turned round."""
    tap = tl.arange(0, WIDE)
    inside = here[:, None] & (tap < TAPS)[None, :]
    rows = tl.load(weight + channel[:, None] * TAPS + tap[None, :], mask=inside, other=0.0).to(tl.float32)
    taps = ()
    for number in tl.static_range(TAPS):
        taps += (tl.sum(tl.where((tap == number)[None, :], rows, 0.0), 1),)
    return taps


@triton.jit
def _keep(x, tail, first, end, channel, kept, x_stride, CHANNELS: tl.constexpr, TAIL: tl.constexpr):
    """Store the new tail. Where a step has fewer tokens than it, the old one moves up: all is read, then stored."""
    new = ()
    for tap in tl.static_range(TAIL):
        source = end - TAIL + tap
        now = channel < tl.where(source >= first, CHANNELS, 0)
        row = tl.load(x + source.to(tl.int64) * x_stride + channel, mask=now, other=0.0)
        at = tail + (source - first + TAIL) * CHANNELS + channel
        past = tl.load(at, mask=channel < tl.where(source >= first, 0, kept), other=0.0)
        new += (tl.where(now, row, past),)
    tl.debug_barrier()
    for tap in tl.static_range(TAIL):
        tl.store(tail + tap * CHANNELS + channel, new[tap], mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def convolve(
    x, weight, bias, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_C: tl.constexpr, ITEM: tl.constexpr, BY_SEQUENCE: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1), BY_SEQUENCE, or (., as many runs of BLOCK_T tokens as there can be).

    WIDE: a power of 2 from TAPS on. Rows of nobody get zeros. A run must be at least as long as the tail.
    """
    TAIL: tl.constexpr = TAPS - 1
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = channel < CHANNELS
    sequence, number = tl.program_id(1), 0
    if not BY_SEQUENCE:
        sequence, number, _ = find_chunk(sequence, q_starts, kv_lens, num_rows, num_seqs, 1, BLOCK_T, True)
        if sequence > num_seqs:
            return
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    begin, upto = first, end
    if not BY_SEQUENCE:
        begin = first + number * BLOCK_T
        upto = tl.minimum(begin + BLOCK_T, end)
    tail = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), ITEM)
    # The inputs before the run: in the tail those of the first.
    kept = tl.where(live & old & (number == 0), CHANNELS, 0)
    before = channel < tl.where(live & (number > 0), CHANNELS, 0)
    past = ()
    for tap in tl.static_range(TAIL):
        past += (tl.load(tail + tap * CHANNELS + channel, mask=channel < kept, other=0.0).to(tl.float32),)
    taps = _taps(weight, channel, here, TAPS, WIDE)
    start = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        start += tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    window = ()
    for tap in tl.static_range(TAIL):
        at = x + (begin - TAIL + tap).to(tl.int64) * x_stride + channel
        window += (tl.where(before, tl.load(at, mask=before, other=0.0).to(tl.float32), past[tap]),)
    if (number == 0) & live:
        _keep(x, tail, first, end, channel, kept, x_stride, CHANNELS, TAIL)
    for done in range(0, upto - begin, TOGETHER):
        top = begin.to(tl.int64) + done
        rows = ()
        for count in tl.static_range(TOGETHER):
            inside = channel < tl.where(live & (top + count < upto), CHANNELS, 0)
            rows += (tl.load(x + (top + count) * x_stride + channel, mask=inside, other=0.0),)
        for count in tl.static_range(TOGETHER):
            now = rows[count].to(tl.float32)
            y = start
            for tap in tl.static_range(TAIL):
                y += taps[tap] * window[tap]
            y += taps[TAIL] * now
            if SILU:
                y = y / (1.0 + tl.exp2(y * -LOG2_E))
            inside = channel < tl.where(top + count < upto, CHANNELS, 0)
            at = out + (top + count) * CHANNELS + channel
            tl.store(at, tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=inside)
            if TAIL:
                window = window[1:] + (now,)  # noqa: RUF005 - Triton knows no starred tuple


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
        WIDE=triton.next_power_of_2(taps),
        BLOCK_T=run,
        TOGETHER=min(run, TOGETHER),
        BLOCK_C=wide,
        ITEM=x.element_size(),
        BY_SEQUENCE=by_sequence,
        HAS_BIAS=bias is not None,
        SILU=act == "silu",
        PDL=pdl,
        num_warps=max(wide // 256, 1),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
