"""The Triton kernel of rglru: a program goes through one sequence, for some of the channels.

The inputs of TOKENS tokens are loaded, and their decays made, together; states then follow one by one, in registers. A
long prompt runs on as many programs as there are blocks of channels, and waits for memory once every TOKENS tokens:
segments that start from zeros, as those of kernels/selective_scan_triton.py, would fill the device. Decoding has
nothing to gain from them.
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
from treadle.kernels.blocks_triton import arena, rows_of, state_at

TOKENS = 16
"""Tokens that are loaded together."""
CHANNELS = 64
"""Channels of a program: one warp, so that nobody waits for others."""


@triton.jit
def _softplus(x):
    # log1p(e) = log(u) e / (u - 1) with u = 1 + e rounded: the slowest decays come from the smallest values
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def _faded(x):
    """Return 1 - exp(x), x <= 0, with all its digits near 0, as a series there."""
    series = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0))
    series = 1.0 + x * (1.0 / 3.0) * (1.0 + x * 0.25 * (1.0 + x * 0.2 * series))
    return tl.where(x > -0.25, -x * (1.0 + x * 0.5 * series), 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def rglru_steps(
    x, in_gate, a_gate, in_bias, a_bias, param, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows,
    num_seqs, x_stride, in_stride, a_stride,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1). The last is that of the rows past all sequences: they get zeros."""
    c, sequence = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1)
    inside = c < CHANNELS
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + c
    state = tl.load(at, mask=c < tl.where(live & old, CHANNELS, 0), other=0.0)
    in_shift = tl.load(in_bias + c, mask=inside, other=0.0).to(tl.float32)
    a_shift = tl.load(a_bias + c, mask=inside, other=0.0).to(tl.float32)
    rate = -8.0 * _softplus(tl.load(param + c, mask=inside, other=0.0).to(tl.float32))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r = tl.arange(0, TOKENS)
    fresh = tl.where(old, end, first)  # the row of a sequence's first token, past the last where it was long ago
    for start in range(first, end, TOKENS):
        t = (start + r).to(tl.int64)[:, None]
        tile = (start + r < end)[:, None] & inside[None, :]
        value = tl.load(x + t * x_stride + c[None, :], mask=tile, other=0.0).to(tl.float32)
        gate = tl.load(in_gate + t * in_stride + c[None, :], mask=tile, other=0.0).to(tl.float32) + in_shift[None, :]
        fade = tl.load(a_gate + t * a_stride + c[None, :], mask=tile, other=0.0).to(tl.float32) + a_shift[None, :]
        exponent = rate[None, :] * tl.sigmoid(fade)
        lost = _faded(exponent)
        decays = tl.where(exponent > -0.25, 1.0 - lost, tl.exp(exponent))
        # 1 - a^2 = (1 - a) (1 + a)
        share = tl.where((start + r == fresh)[:, None], 1.0, tl.sqrt(lost * (2.0 - lost)))
        added = share * (value * tl.sigmoid(gate))
        states = tl.zeros((TOKENS, BLOCK_C), tl.float32)
        for i in tl.static_range(TOKENS):
            mine = (r == i)[:, None]
            decay, new = tl.sum(tl.where(mine, decays, 0.0), 0), tl.sum(tl.where(mine, added, 0.0), 0)
            state = tl.where(start + i < end, tl.fma(decay, state, new), state)
            states = tl.where(mine, state[None, :], states)
        states = tl.where(live, states, 0.0)
        tl.store(out + t * CHANNELS + c[None, :], states.to(out.dtype.element_ty), mask=tile)
    tl.store(at, state, mask=c < tl.where(live, CHANNELS, 0))


def rglru(
    x: Tensor,
    in_gate: Tensor,
    a_gate: Tensor,
    in_bias: Tensor,
    a_bias: Tensor,
    param: Tensor,
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
    """Return ``rglru``'s result, computed in fp32. Shapes: as the reference.

    ``invariant``: by a kernel that does not depend on the step; tokens are taken one by one in any case.
    """
    x, in_gate, a_gate = (rows_dense(each) for each in (x, in_gate, a_gate))
    (tokens, channels), sequences = x.shape, kv_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    together = 1 if tokens <= sequences and not invariant else TOKENS
    wide = min(triton.next_power_of_2(channels), CHANNELS)
    rglru_steps[(triton.cdiv(channels, wide), sequences + 1)](
        x,
        in_gate,
        a_gate,
        in_bias.contiguous(),
        a_bias.contiguous(),
        param.contiguous(),
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
        in_gate.stride(0),
        a_gate.stride(0),
        CHANNELS=channels,
        BLOCK_C=wide,
        TOKENS=together,
        PDL=pdl,
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
