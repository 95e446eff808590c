"""Launches the kernels of delta_rule on a GPU: steps for short sequences, chunks for long ones."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from treadle.graph.recurrent_rows import chunk_tokens
from treadle.kernels.blocks_native import rows_dense
from treadle.kernels.blocks_triton import arena, at_most, element, precision, turns
from treadle.kernels.delta_rule_chunks_triton import advance, prepare
from treadle.kernels.delta_rule_steps_triton import delta_steps

LEAST = 16
"""Sequences of fewer tokens go token by token: a chunk takes as long however full it is."""
WIDTHS = ((64, 2048), (32, 512), (16, 0))
"""Value channels of a program of `steps`, and how many such programs there must be: wide ones move a state faster, but
only many keep the memory of a device busy."""
INVARIANT_WIDTH = 32
"""The same where it may not depend on the step."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    scale: float,
    l2norm: bool = True,
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Return ``delta_rule``'s result. Shapes: as the reference.

    ``invariant``: every token by itself, in blocks that do not depend on the step.
    """
    q, k, v, g, beta = (rows_dense(x) for x in (q, k, v, g, beta))
    tokens, heads, v_dim = v.shape
    sequences, k_dim = kv_lens.shape[0], k.shape[2]
    out = torch.empty((tokens, heads, v_dim), dtype=v.dtype, device=v.device)
    if tokens == 0:
        return out
    state = (arena(memory), blocks, offset, q_starts, positions, kv_lens, tokens, sequences)
    sizes: dict[str, Any] = {"HEADS": heads, "K_DIM": k_dim, "V_DIM": v_dim, "BY_CHANNEL": g.dim() == 3, "PDL": pdl}
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    given = (q, k, v, g, beta)
    few = tokens <= sequences or tokens < LEAST
    least = 0 if invariant or few else LEAST
    if least:
        chunks(given, out, state, scale, l2norm, sizes, options)
    block_k = triton.next_power_of_2(k_dim)
    width = next(wide for wide, many in WIDTHS if sequences * heads * triton.cdiv(v_dim, wide) >= many)
    wide = min(INVARIANT_WIDTH if invariant else width, max(triton.next_power_of_2(v_dim), 8))
    cells = block_k * wide
    delta_steps[(triton.cdiv(v_dim, wide), heads, sequences + 1)](
        *given,
        out,
        *state,
        *(x.stride(0) for x in given),
        scale,
        K_HEADS=k.shape[1],
        BLOCK_K=block_k,
        BLOCK_V=wide,
        L2NORM=l2norm,
        LEAST=least,
        num_warps=min(max(cells // 1024, 1), max(cells // 2048, 4), 8),
        **sizes,
        **options,
    )
    return out


def chunks(
    given: tuple[Tensor, ...], out: Tensor, state: tuple[Any, ...], scale: float, l2norm: bool, sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Launch the two kernels for sequences of LEAST tokens or more."""
    q, k = given[:2]
    heads, k_dim, v_dim, by_channel = sizes["HEADS"], sizes["K_DIM"], sizes["V_DIM"], sizes["BY_CHANNEL"]
    _, _, _, q_starts, _, kv_lens, tokens, sequences = state
    block_k, block_v = (max(triton.next_power_of_2(size), 16) for size in (k_dim, v_dim))
    chunk = chunk_tokens(q.element_size())
    slots = tokens // chunk + sequences
    by_row = [q.new_empty((tokens, heads, size)) for size in (k_dim, k_dim, k_dim, v_dim, chunk)]
    fades = q.new_empty((slots, heads, k_dim if by_channel else 1), dtype=torch.float32)
    constants = {
        **sizes,
        "BLOCK_K": block_k,
        "LEAST": LEAST,
        "CHUNK": chunk,
        "COMPUTE": element(q.dtype),
        "PRECISION": precision(q.dtype),
    }
    prepare[(at_most(tokens, min(sequences, tokens // LEAST), chunk), heads)](
        *given,
        *by_row,
        fades,
        q_starts,
        kv_lens,
        tokens,
        sequences,
        *(x.stride(0) for x in given),
        scale,
        K_HEADS=k.shape[1],
        BLOCK_V=block_v,
        L2NORM=l2norm,
        LEVELS=chunk.bit_length() - 1,
        num_warps=8,
        **constants,
        **options,
    )
    wide = min(block_v, 32)
    roomy = q.dtype is not torch.float32 and block_k <= 128
    programs = triton.cdiv(v_dim, wide) * heads
    most = min(sequences, tokens // LEAST)
    advance[(triton.cdiv(v_dim, wide), heads, turns(most, programs, q.device))](
        *by_row,
        fades,
        out,
        *state,
        BLOCK_V=wide,
        STAGES=2 if roomy else 1,
        num_warps=4 if block_k <= 128 else 8,
        **constants,
        **options,
    )
