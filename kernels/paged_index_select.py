"""paged_index_select: the choice of ``index_select`` over keys in the pages of each sequence.

The n queries of a sequence are its last n tokens: query i stands at position kv_len - n + i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels.cache_write import elements
from treadle.kernels.index_select import choose
from treadle.kernels.registry import register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def paged_index_select(
    q: Tensor,
    weights: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    topk: int,
) -> Tensor:
    """Return the choice of every token; rows of no live sequence choose nothing.

    Shapes: q [T, H, D]; weights [T, H]; arena bytes [N] uint8, holding q's dtype; page_table [B, M] int32;
    q_starts [B + 1] int32; kv_lens [B] int32; layer_offset one int64 (bytes inside a page); result [T, topk] int32.
    """
    out = q.new_full((len(q), topk), -1, dtype=torch.int32)
    cache = arena.view(q.dtype)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if length == 0 or num_queries == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        keys, _ = elements(pages, tokens, layer_offset, page_tokens, 1, q.shape[-1], 0, q.element_size())
        out[rows] = choose(q[rows], weights[rows], cache[keys[:, 0]], tokens[length - num_queries :], topk)
    return out


def _always(target: Target, attrs: Mapping[str, Any]) -> bool:  # noqa: ARG001  (the predicate's signature)
    return True


register_reference("paged_index_select", paged_index_select, inline=False)
register_triton("paged_index_select", "paged_index_select_triton", _always)
