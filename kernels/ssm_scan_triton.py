"""The Triton kernels of ssm_scan: token by token for short sequences, chunks on the tensor cores for long ones.

    steps     a program per (sequence, head, block of channels): its rows of the state are read and written once
    chunks    the same programs for long sequences, 64 tokens at a time (kernels/ssm_scan.py derives it):

        out = exp(c) (C S') + M x + D x          M[i, j] = C[i] . B[j] exp(c[i] - c[j]) dt[j] for j <= i
        S   = exp(c[n]) S + (dt exp(c[n] - c) x)' B

One phase does for chunks: all of it are four products, and the heads of such models are many and small (128 of 64
channels give 256 programs for one prompt). Channels of a head do not mix, so that blocks of them only make C B' anew.
With PDL the state is read before a kernel waits for its predecessor, as in kernels/delta_rule_steps_triton.py.
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

from treadle.graph.recurrent_rows import chunk_tokens
from treadle.kernels.blocks_native import rows_dense, whole
from treadle.kernels.blocks_triton import (
    LEAST_DECAY,
    arena,
    element,
    find_sequence,
    precision,
    rows_of,
    state_at,
    turns,
)

LEAST = 16
"""Sequences of fewer tokens go token by token: a chunk takes as long however full it is."""
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


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def ssm_chunks(
    x, dt, a, b, c, skip, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    x_stride, dt_stride, b_stride, c_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, heads, any number of programs that take turns at the sequences)."""
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    p, n = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    r = tl.arange(0, CHUNK)
    b_at, c_at = b + group * SIZE, c + group * SIZE
    by_b, by_c = (r * b_stride)[:, None] + n[None, :], (r * c_stride)[:, None] + n[None, :]
    by_x = (r * x_stride)[:, None] + p[None, :]
    _, ranks = find_sequence(-1, q_starts, kv_lens, num_rows, num_seqs, LEAST)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for rank in range(tl.program_id(2), ranks, tl.num_programs(2)):
        sequence, _others = find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, LEAST)
        first, end, _live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
        inside = (p < DIM)[:, None] & (n < SIZE)[None, :]
        at = state_at(memory, blocks, offset, sequence, 4) + head * (DIM * SIZE)
        at = at + (p * SIZE)[:, None] + n[None, :]
        state = tl.load(at, mask=inside & (p < tl.where(old, DIM, 0))[:, None], other=0.0)
        rate = tl.load(a + head)
        skipped = 0.0
        if SKIP:
            skipped = tl.load(skip + head)
        for start in tl.range(first, end, CHUNK, num_stages=STAGES):
            # Offsets inside of a chunk are 32 bits wide: registers are short here.
            live, t = r < end - start, first.to(tl.int64) + (start - first)
            wide, tall = live[:, None] & (n < SIZE)[None, :], live[:, None] & (p < DIM)[None, :]
            step = tl.load(dt + t * dt_stride + head + r * dt_stride, mask=live, other=0.0)
            key = tl.load(b_at + t * b_stride + by_b, mask=wide, other=0.0).to(COMPUTE)
            query = tl.load(c_at + t * c_stride + by_c, mask=wide, other=0.0).to(COMPUTE)
            value = tl.load(x + t * x_stride + head * DIM + by_x, mask=tall, other=0.0)
            decays = tl.maximum(step * rate, LEAST_DECAY)
            sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
            between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * step[None, :]
            pair = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            pair = tl.where(r[:, None] >= r[None, :], pair * between, 0.0).to(COMPUTE)
            result = tl.dot(query, tl.trans(state.to(COMPUTE)), input_precision=PRECISION) * tl.exp(sums)[:, None]
            result += tl.dot(pair, value.to(COMPUTE), input_precision=PRECISION)
            if SKIP:
                result += skipped * value.to(tl.float32)
            at_out = out + (t * HEADS + head) * DIM + (r * (HEADS * DIM))[:, None] + p[None, :]
            tl.store(at_out, result.to(out.dtype.element_ty), mask=tall)
            rest = step * tl.exp(tl.minimum(total - sums, 0.0))
            added = (value.to(tl.float32) * rest[:, None]).to(COMPUTE)
            state = state * tl.exp(total) + tl.dot(tl.trans(added), key, input_precision=PRECISION)
        tl.store(at, state, mask=inside)


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
    least = 0 if invariant or tokens <= sequences or tokens < LEAST else LEAST
    sizes: dict[str, Any] = {
        "HEADS": heads,
        "GROUPS": groups,
        "DIM": dim,
        "SIZE": size,
        "SKIP": skips is not None,
        "LEAST": least,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    block_n, block_p = triton.next_power_of_2(size), triton.next_power_of_2(dim)
    if least:
        wide = min(max(block_p, 16), 32)
        most, programs = min(sequences, tokens // LEAST), triton.cdiv(dim, wide) * heads
        ssm_chunks[(triton.cdiv(dim, wide), heads, turns(most, programs, x.device))](
            *inputs,
            BLOCK_P=wide,
            BLOCK_N=max(block_n, 16),
            CHUNK=chunk_tokens(x.element_size()),
            STAGES=2 if x.dtype is not torch.float32 and block_n <= 256 else 1,
            COMPUTE=element(x.dtype),
            PRECISION=precision(x.dtype),
            num_warps=8,
            **sizes,
        )
    tall = max(min(block_p, 4096 // block_n), 1)
    if not invariant and sequences * heads * triton.cdiv(dim, tall) < MANY_PROGRAMS:
        tall = max(min(tall, 2048 // block_n), 1)
    ssm_steps[(triton.cdiv(dim, tall), heads, sequences + 1)](
        *inputs, BLOCK_P=tall, BLOCK_N=block_n, num_warps=min(max(tall * block_n // 1024, 1), 8), **sizes
    )
    return out
