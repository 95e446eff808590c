"""Attention over a window beside compressed rows (DeepSeek V4).

``graph.ops`` registers the ops. A token leaves one row of R channels: its key D (which is its value too), then what
compressed rows are made of: content and gate of W channels each, and with an index content and gate of WI channels
each. W = D, or 2 D with ``overlap``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_COMPRESS = (
    "Tensor? sinks, Tensor ape, Tensor norm, Tensor table, Tensor? index_q, Tensor? index_weights, Tensor? index_ape,"
    " Tensor? index_norm, int rate, bool overlap, int topk, int window, float scale, float eps"
)
SCHEMAS: dict[str, str] = {
    # q [T, H, D], k [T, R], kv [B, L, 1, R], sinks [H], ape [rate, W], norm [D], table [L, 2 r], index_q [T, HI, DI],
    # index_weights [T, HI] float32, index_ape [rate, WI], index_norm [DI] -> [T, H, D]. topk 0: all compressed rows
    "compressed_attention": "(Tensor q, Tensor k, Tensor(a!) kv, Tensor seq_ids, Tensor positions, Tensor q_starts,"
    f" Tensor kv_lens, {_COMPRESS}) -> Tensor",
    # the same over pages, where `latent_write` has stored k; row_dim = R
    "paged_compressed_attention": "(Tensor q, Tensor arena, Tensor page_table, Tensor q_starts, Tensor kv_lens,"
    f" Tensor layer_offset, int page_tokens, int row_dim, {_COMPRESS}) -> Tensor",
}
WRITES_STATE = frozenset({"compressed_attention"})


def _like(q: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(q.shape)


SHAPES: dict[str, Callable[..., object]] = dict.fromkeys(SCHEMAS, _like)
