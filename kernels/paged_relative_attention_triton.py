"""paged_relative_attention on a GPU: the attention that has one order of sums, with a bias that each query brings."""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.paged_attention_invariant import launch


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
    *,
    pdl: bool = False,
    invariant: bool = False,
    split: bool | None = None,
) -> Tensor:
    """Return ``paged_relative_attention``'s result; ``split`` replaces the choice whether programs share a history.

    ``invariant``: a row's result depends on no other row. Shapes: as the reference.
    """
    return launch(
        q, arena, page_table, q_starts, kv_lens, layer_offset, None, bias, page_tokens, kv_heads, v_dim, scale, window,
        pdl=pdl, invariant=invariant, split=split,
    )  # fmt: skip
