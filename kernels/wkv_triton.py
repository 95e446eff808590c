"""The Triton kernel of wkv: a program goes through one sequence, for some of the channels.

The inputs of TOKENS tokens are loaded together; means then follow one by one, with the sums in registers. A long prompt
runs on as many programs as there are blocks of channels, and a token waits for the exponentials of the one before:
segments that start from no tokens, as those of kernels/selective_scan_triton.py, would fill the device. Decoding has
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
LOWEST = tl.constexpr(-1e38)
"""the exponent of no tokens at all"""


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def wkv_steps(
    k, v, decay, first_weight, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs, k_stride,
    v_stride, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences + 1). The last is that of the rows past all sequences: they get zeros."""
    c, sequence = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1)
    inside = c < CHANNELS
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + c
    known = c < tl.where(live & old, CHANNELS, 0)
    total = tl.load(at, mask=known, other=0.0)
    weight = tl.load(at + CHANNELS, mask=known, other=0.0)
    largest = tl.load(at + 2 * CHANNELS, mask=known, other=LOWEST)
    rate = tl.exp(tl.load(decay + c, mask=inside, other=0.0).to(tl.float32))
    extra = tl.load(first_weight + c, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r = tl.arange(0, TOKENS)
    for start in range(first, end, TOKENS):
        t = (start + r).to(tl.int64)[:, None]
        tile = (start + r < end)[:, None] & inside[None, :]
        keys = tl.load(k + t * k_stride + c[None, :], mask=tile, other=0.0).to(tl.float32)
        values = tl.load(v + t * v_stride + c[None, :], mask=tile, other=0.0).to(tl.float32)
        means = tl.zeros((TOKENS, BLOCK_C), tl.float32)
        for i in tl.static_range(TOKENS):
            mine, there = (r == i)[:, None], start + i < end
            key, value = tl.sum(tl.where(mine, keys, 0.0), 0), tl.sum(tl.where(mine, values, 0.0), 0)
            top = tl.maximum(largest, key + extra)
            before, own = tl.exp(largest - top), tl.exp(key + extra - top)
            mean = tl.fma(before, total, own * value) / tl.fma(before, weight, own)
            means = tl.where(mine, mean[None, :], means)
            # what the next token finds
            top = tl.maximum(largest - rate, key)
            before, own = tl.exp(largest - rate - top), tl.exp(key - top)
            total = tl.where(there, tl.fma(before, total, own * value), total)
            weight = tl.where(there, tl.fma(before, weight, own), weight)
            largest = tl.where(there, top, largest)
        means = tl.where(live, means, 0.0)
        tl.store(out + t * CHANNELS + c[None, :], means.to(out.dtype.element_ty), mask=tile)
    kept = c < tl.where(live, CHANNELS, 0)
    tl.store(at, total, mask=kept)
    tl.store(at + CHANNELS, weight, mask=kept)
    tl.store(at + 2 * CHANNELS, largest, mask=kept)


def wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    first: Tensor,
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
    """Return ``wkv``'s result, computed in fp32. Shapes: as the reference.

    ``invariant``: by a kernel that does not depend on the step; tokens are taken one by one in any case.
    """
    k, v = rows_dense(k), rows_dense(v)
    (tokens, channels), sequences = k.shape, kv_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=k.dtype, device=k.device)
    if tokens == 0:
        return out
    together = 1 if tokens <= sequences and not invariant else TOKENS
    wide = min(triton.next_power_of_2(channels), CHANNELS)
    wkv_steps[(triton.cdiv(channels, wide), sequences + 1)](
        k,
        v,
        decay.contiguous(),
        first.contiguous(),
        out,
        arena(memory),
        blocks,
        offset,
        q_starts,
        positions,
        kv_lens,
        tokens,
        sequences,
        k.stride(0),
        v.stride(0),
        CHANNELS=channels,
        BLOCK_C=wide,
        TOKENS=together,
        PDL=pdl,
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
