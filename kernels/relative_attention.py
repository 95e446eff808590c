"""relative_attention, paged_relative_attention: attention with a bias by distance that each query makes (Inkling).

logit[h, i, j] = scale * q[i, h] . k[j, h // G] + (bias[i, h, i - j] if i - j < E else 0)

The rest is ``attention``: causal, in fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels.cache_write import elements
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.skinny import DTYPES
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def attend_relative(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    """Return the attention of the queries of one sequence over its keys, in fp32.

    Shapes: q [T, H, Dk] at ``positions`` [T]; bias [T, H, E]; k [S, K, Dk], v [S, K, Dv]; result [T, H, Dv].
    """
    num_queries, heads, k_dim = q.shape
    length, kv_heads, v_dim = v.shape
    extent = bias.shape[-1]
    queries = q.float().view(num_queries, kv_heads, -1, k_dim).permute(1, 2, 0, 3)
    logits = (queries @ k.float().permute(1, 2, 0).unsqueeze(1) * scale).view(heads, num_queries, length)
    distance = positions.view(-1, 1) - torch.arange(length, device=q.device)
    place = distance.clamp(0, extent - 1).expand(heads, -1, -1)
    extra = bias.float().transpose(0, 1).gather(-1, place).masked_fill(distance >= extent, 0.0)
    visible = distance >= 0
    if window:
        visible &= distance < window
    shares = (logits + extra).masked_fill(~visible, float("-inf")).softmax(-1)
    values = v.float().masked_fill(~visible.any(0).view(-1, 1, 1), 0.0)
    result = shares.view(kv_heads, -1, num_queries, length) @ values.permute(1, 0, 2).unsqueeze(1)
    return result.permute(2, 0, 1, 3).reshape(num_queries, heads, v_dim)


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    kv: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Append keys and values to ``kv``, then return the attention of every query over its sequence's history.

    Shapes: q [T, H, Dk]; k [T, K, Dk]; v [T, K, Dv]; bias [T, H, E]; kv [B, L, K, Dk + Dv]; result [T, H, Dv].
    """
    live = positions >= 0
    kv[seq_ids[live].long(), positions[live]] = torch.cat([k, v], -1)[live].to(kv.dtype)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    starts, k_dim = q_starts.tolist(), k.shape[-1]
    for sequence, length in enumerate(kv_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        history = kv[sequence, :length]
        out[rows] = attend_relative(
            q[rows], history[..., :k_dim], history[..., k_dim:], bias[rows], positions[rows], scale, window
        ).to(q.dtype)
    return out


def paged_relative_attention(
    q: Tensor,
    bias: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Return the same over the pages of each sequence. Shapes: as ``paged_attention``; bias [T, H, E]."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    cache = arena.view(q.dtype)
    starts = q_starts.tolist()
    for sequence, length in enumerate(kv_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        queries = rows.stop - rows.start
        if length == 0 or queries == 0:
            continue
        # pages behind the window of the first query may be anyone's
        first = max(0, length - queries - window + 1) if window else 0
        tokens = torch.arange(first, length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        keys, values = elements(
            pages, tokens, layer_offset, page_tokens, kv_heads, q.shape[-1], v_dim, q.element_size()
        )
        positions = torch.arange(length - queries, length, device=q.device) - first
        out[rows] = attend_relative(q[rows], cache[keys], cache[values], bias[rows], positions, scale, window).to(
            q.dtype
        )
    return out


def _known_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "q", "bias") <= DTYPES


register_reference("relative_attention", relative_attention, inline=False)
register_reference("paged_relative_attention", paged_relative_attention, inline=False)
register_triton("paged_relative_attention", "paged_relative_attention_triton", _known_type, invariant=True)
