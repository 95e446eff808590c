"""Attention that differs from ``attention`` in what it reads: another layer's history, a bias, or chosen blocks.

The legend is that of ``graph.ops``, which registers them beside its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

SCHEMAS: dict[str, str] = {
    # attention over a history that an earlier call of the step has appended to: kv [B, L, K, Dk + Dv]
    "shared_attention": "(Tensor q, Tensor kv, Tensor seq_ids, Tensor positions, Tensor q_starts, Tensor kv_lens,"
    " Tensor? sinks, int v_dim, float scale, int window=0, float softcap=0.0, int chunk=0, Tensor? slopes=None)"
    " -> Tensor",
    # bias [T, H, E]: added to the logits of keys at distance 0 .. E - 1
    "relative_attention": "(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor(a!) kv, Tensor seq_ids, Tensor positions,"
    " Tensor q_starts, Tensor kv_lens, float scale, int window=0) -> Tensor",
    "paged_relative_attention": "(Tensor q, Tensor bias, Tensor arena, Tensor page_table, Tensor q_starts,"
    " Tensor kv_lens, Tensor layer_offset, int page_tokens, int kv_heads, int v_dim, float scale, int window=0)"
    " -> Tensor",
    # index_q [T, HI, DI], index_k [T, DI], keys [B, L, 1, DI]: each index head chooses `topk` blocks of `block` keys,
    # of which the last `local` are some, and its share of the query heads sees those
    "block_attention": "(Tensor q, Tensor k, Tensor v, Tensor index_q, Tensor index_k, Tensor(a!) kv, Tensor(b!) keys,"
    " Tensor seq_ids, Tensor positions, Tensor q_starts, Tensor kv_lens, float scale, int block, int topk, int local)"
    " -> Tensor",
    "paged_block_attention": "(Tensor q, Tensor index_q, Tensor arena, Tensor page_table, Tensor q_starts,"
    " Tensor kv_lens, Tensor layer_offset, Tensor keys_offset, int page_tokens, int kv_heads, int v_dim, float scale,"
    " int block, int topk, int local) -> Tensor",
}
MODEL_OPS = ("shared_attention", "relative_attention", "block_attention")
WRITES_STATE = frozenset({"relative_attention", "block_attention"})


def _shared(q: Tensor, *rest: object, **_: object) -> Tensor:
    v_dim = rest[6]
    assert isinstance(v_dim, int)
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


def _relative(q: Tensor, *rest: object, **_: object) -> Tensor:
    v = rest[1]
    assert isinstance(v, Tensor)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


def _paged_relative(q: Tensor, *rest: object, **_: object) -> Tensor:
    v_dim = rest[8]
    assert isinstance(v_dim, int)
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


def _paged_block(q: Tensor, *rest: object, **_: object) -> Tensor:
    v_dim = rest[9]
    assert isinstance(v_dim, int)
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


SHAPES: dict[str, Callable[..., object]] = {
    "shared_attention": _shared,
    "relative_attention": _relative,
    "paged_relative_attention": _paged_relative,
    "block_attention": _relative,
    "paged_block_attention": _paged_block,
}
