"""paged_attention: causal attention of a ragged batch over the pages of each sequence.

The math is that of ``attention``; keys and values come from the arena (the layout is in ``cache_write``). The n queries
of a sequence are its last n tokens: query i stands at position kv_len - n + i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.attention import attend
from treadle.kernels.cache_write import elements
from treadle.kernels.registry import register_reference


def paged_attention(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return the attention of every query over its sequence's pages.

    Sequences with ``kv_lens`` 0, and rows past the last sequence, give zeros.
    Shapes: q [T, H, Dk]; arena bytes [N] uint8, holding q's dtype; page_table [B, M] int32; q_starts [B + 1] int32;
    kv_lens [B] int32; layer_offset one int64 (bytes inside a page); sinks [H]; result [T, H, Dv].
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    cache = arena.view(q.dtype)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if length == 0 or num_queries == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        keys, values = elements(
            pages, tokens, layer_offset, page_tokens, kv_heads, q.shape[-1], v_dim, q.element_size()
        )
        positions = torch.arange(length - num_queries, length, device=q.device)
        out[rows] = attend(q[rows], cache[keys], cache[values], positions, sinks, scale, window, softcap).to(q.dtype)
    return out


register_reference("paged_attention", paged_attention, inline=False)
