"""The semantic ops of latent attention (MLA) and of a sparse choice of keys; ``treadle.graph.ops`` registers them.

A token's key is one row of D channels that all query heads share; its value is the first ``v_dim`` channels of it.
``select`` [T, N] int32, where there is one, names the positions of the only keys that each token sees, -1 behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SCHEMAS: dict[str, str] = {
    # x [T, H, Di], weight [H, Do, Di] -> [T, H, Do]: each head by a matrix of its own
    "head_linear": "(Tensor x, Tensor weight) -> Tensor",
    # q [T, H, D], k [T, D], kv [B, L, 1, D] -> [T, H, v_dim]; as `attention` in all else
    "latent_attention": "(Tensor q, Tensor k, Tensor(a!) kv, Tensor seq_ids, Tensor positions, Tensor q_starts,"
    " Tensor kv_lens, Tensor? sinks, float scale, int v_dim, int window=0, Tensor? select=None) -> Tensor",
    # k [T, D] -> arena bytes, as `cache_write` of one head without values
    "latent_write": "(Tensor k, Tensor(a!) arena, Tensor page_table, Tensor seq_ids, Tensor positions,"
    " Tensor layer_offset, int page_tokens) -> ()",
    # q [T, H, D] over the pages of each sequence -> [T, H, v_dim]; pages hold q's dtype
    "paged_latent_attention": "(Tensor q, Tensor arena, Tensor page_table, Tensor q_starts, Tensor kv_lens,"
    " Tensor layer_offset, Tensor? sinks, int page_tokens, float scale, int v_dim, int window=0,"
    " Tensor? select=None) -> Tensor",
    # q [T, H, D], k [T, D], weights [T, H], keys [B, L, 1, D] -> [T, topk] int32: the positions, ascending, of the topk
    # keys up to a token's own with the highest sum over heads of weight * relu(q . k); -1 where there are fewer
    "index_select": "(Tensor q, Tensor k, Tensor weights, Tensor(a!) keys, Tensor seq_ids, Tensor positions,"
    " Tensor q_starts, Tensor kv_lens, int topk) -> Tensor",
    # the same over pages, where `latent_write` has stored k
    "paged_index_select": "(Tensor q, Tensor weights, Tensor arena, Tensor page_table, Tensor q_starts, Tensor kv_lens,"
    " Tensor layer_offset, int page_tokens, int topk) -> Tensor",
}


def _head_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[1])


def _latent_attention(
    q: Tensor,
    k: Tensor,
    kv: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    v_dim: int,
    *_: object,
    **__: object,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


def _paged_latent_attention(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    scale: float,
    v_dim: int,
    *_: object,
    **__: object,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


def _nothing(*_: object, **__: object) -> None:
    return None


def _index_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    keys: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    topk: int,
) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _paged_index_select(
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
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


SHAPES: dict[str, Callable[..., object]] = {
    "head_linear": _head_linear,
    "latent_attention": _latent_attention,
    "latent_write": _nothing,
    "paged_latent_attention": _paged_latent_attention,
    "index_select": _index_select,
    "paged_index_select": _paged_index_select,
}

WRITES_STATE = frozenset({"latent_attention", "latent_write", "index_select"})
"""Ops that change an input in place."""
