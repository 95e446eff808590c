"""norm_rope_cache_write: rope_cache_write of queries and keys whose heads are normed first (Qwen3, Gemma 3).

    q' = rope(norm(q)),  k' = rope(norm(k)),  cache_write(k', v)

Both norms are over the channels of a head and share every attribute; each may have a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels.norm import norm
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.rope_cache_write import rope_cache_write
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def norm_rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    cast: str = "after",
) -> Tensor:
    """Write the normed and rotated ``k`` and ``v`` into the arena and return the normed and rotated ``q``.

    Shapes: q_norm [Dk] or [H, Dk], k_norm [Dk] or [K, Dk]; the others as in ``rope_cache_write``.
    """
    q = norm(q, q_norm, None, kind, eps, plus_one, 1, cast)
    k = norm(k, k_norm, None, kind, eps, plus_one, 1, cast)
    return rope_cache_write(
        q, k, v, table, arena, page_table, seq_ids, positions, layer_offset, page_tokens, layout, at
    )


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    names = [name for name in ("q", "k", "v", "q_norm", "k_norm") if name in attrs.get("dtypes", {})]
    known = attrs.get("dtypes", {}).get("table", torch.float32) == torch.float32
    return known and len(dtypes_of(target, attrs, *names)) == 1


register_reference("norm_rope_cache_write", norm_rope_cache_write, inline=False)
register_triton("norm_rope_cache_write", "cache_write_triton", _supports, invariant=True)
