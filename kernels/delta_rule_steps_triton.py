"""The Triton kernel of delta_rule token by token: for sequences of one token, or few.

Value channels do not mix: a program has some of them of one head of one sequence, holds their part of the state in
registers from the first token to the last, and reads and writes it once. Both products with the state before a token's
update are taken together, so that a token waits for one reduction:

    out = scale * S' q = scale * ((exp(g) S)' q + (k . q) u)        u = beta * (v - (exp(g) S)' k)

Lengths are divided out behind the sums over key channels, so that these are all taken at once: what sums pass between
warps takes as long as the rest.

With PDL the state is read before the kernel waits for its predecessor, which computes what the tokens are made of: no
kernel but this op's of the same layer touches it.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.blocks_triton import LOG2_E, rows_of, state_at


@triton.jit
def _sum_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _token(
    q, k, v, g, beta, t, there, head, key_head, d, c, q_stride, k_stride, v_stride, g_stride, beta_stride,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Return (q, k, v, g, beta) of a token; zeros if it is not ``there``."""
    keys, values = d < tl.where(there, K_DIM, 0), c < tl.where(there, V_DIM, 0)
    query = tl.load(q + t * q_stride + key_head * K_DIM + d, mask=keys, other=0.0)
    key = tl.load(k + t * k_stride + key_head * K_DIM + d, mask=keys, other=0.0)
    value = tl.load(v + t * v_stride + head * V_DIM + c, mask=values, other=0.0)
    if BY_CHANNEL:
        fade = tl.load(g + t * g_stride + head * K_DIM + d, mask=keys, other=0.0)
    else:
        fade = tl.load(g + t * g_stride + head, mask=there, other=0.0)
    return query, key, value, fade, tl.load(beta + t * beta_stride + head, mask=there, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def delta_steps(
    q, k, v, g, beta, out, memory, blocks, offset, q_starts, positions, kv_lens, num_rows, num_seqs,
    q_stride, k_stride, v_stride, g_stride, beta_stride, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of value channels, heads, sequences + 1).

    Sequences of LEAST tokens or more are left out, unless it is 0. The last is that of the rows past all sequences:
    they get zeros, as those of dead sequences do.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // K_HEADS)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    first, end, live, old = rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs)
    steps = tl.where(live, end, first)
    if LEAST > 0:
        steps = tl.where(end - first >= LEAST, first, steps)
    dead = tl.where(live, first, end)
    inside = (d < tl.where(steps > first, K_DIM, 0))[:, None] & (c < V_DIM)[None, :]
    at = state_at(memory, blocks, offset, tl.minimum(sequence, num_seqs - 1), 4) + head * (K_DIM * V_DIM)
    at = at + (d * V_DIM)[:, None] + c[None, :]
    # What a new sequence has here is read for nothing, so that no read waits for what says that it is new.
    state = tl.load(at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top = first.to(tl.int64)
    query, key, value, fade, rate = _token(
        q, k, v, g, beta, top, first < steps, head, key_head, d, c, q_stride, k_stride, v_stride, g_stride, beta_stride,
        K_DIM, V_DIM, BY_CHANNEL,
    )  # fmt: skip
    state = tl.where(old, state, 0.0)
    for count in range(steps - first):
        key, query = key.to(tl.float32), query.to(tl.float32)
        if BY_CHANNEL:
            state = state * tl.exp2(fade * LOG2_E)[:, None]
        else:
            state = state * tl.exp2(fade * LOG2_E)
        by_key, by_query = tl.reduce((state * key[:, None], state * query[:, None]), 0, _sum_two)
        keys, queries, both = tl.reduce((key * key, query * query, key * query), 0, _sum_three)
        factor = 1.0
        if L2NORM:
            factor = tl.rsqrt(keys + 1e-6)
            scaled = tl.rsqrt(queries + 1e-6) * scale
        else:
            scaled = scale
        change = (value.to(tl.float32) - by_key * factor) * (rate * factor)
        result = (by_query + both * change) * scaled
        t = top + count
        tl.store(out + (t * HEADS + head) * V_DIM + c, result.to(out.dtype.element_ty), mask=c < V_DIM)
        state = state + key[:, None] * change[None, :]
        query, key, value, fade, rate = _token(
            q, k, v, g, beta, t + 1, t + 1 < steps, head, key_head, d, c, q_stride, k_stride, v_stride, g_stride,
            beta_stride, K_DIM, V_DIM, BY_CHANNEL,
        )  # fmt: skip
    tl.store(at, state, mask=inside)
    for count in range(dead - first):
        nothing = tl.zeros((BLOCK_V,), out.dtype.element_ty)
        tl.store(out + ((first.to(tl.int64) + count) * HEADS + head) * V_DIM + c, nothing, mask=c < V_DIM)
