"""rope_cache_write: rotate queries and keys, store keys and values: rope(q), and cache_write(rope(k), v).

One pass over q, k and v between the projections and the attention.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.cache_write import cache_write
from treadle.kernels.registry import register_reference
from treadle.kernels.rope import rope


def rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
) -> Tensor:
    """Write the rotated ``k`` and ``v`` into the arena and return the rotated ``q``.

    Rows at position -1 write nothing. Shapes: q [T, H, Dk]; the others as in ``cache_write`` and ``rope``.
    """
    cache_write(
        rope(k, positions, table, layout, at), v, arena, page_table, seq_ids, positions, layer_offset, page_tokens
    )
    return rope(q, positions, table, layout, at)


register_reference("rope_cache_write", rope_cache_write, inline=False)
