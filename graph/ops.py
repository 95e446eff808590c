"""The semantic ops: one schema and one shape function each, registered once under ``treadle::``.

An op says what is computed, never how: ``treadle.kernels`` holds a plain-torch reference and the fast versions, a file
an op. Legend of shapes: T tokens of the flat batch, B sequences, H query heads, K kv heads, D head dim, C channels.

State and metadata are explicit inputs. A row whose position is negative belongs to no live sequence: it writes no state
and its results are never read.

MODEL level: ``attention`` appends to, and reads, a dense history ``kv`` [B, length, K, Dk + Dv], row = sequence.
SHARDED and LOWERED levels: ``cache_write`` / ``rope_cache_write`` store into the arena, ``paged_attention`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treadle.graph import recurrent_ops

_library = torch.library.Library("treadle", "DEF")  # type: ignore[no-untyped-call]
NAMESPACE = torch.ops.treadle

SCHEMAS: dict[str, str] = {
    # ids [T] int64, weight [V, C] -> [T, C]; the scale is rounded to the weight's dtype first (gemma)
    "embed": "(Tensor ids, Tensor weight, float scale=1.0) -> Tensor",
    # x [T, C] + table[positions + offset]; positions [T] int64, table [L, C]; a negative position reads row `offset`
    "add_positions": "(Tensor x, Tensor positions, Tensor table, int offset=0) -> Tensor",
    # x [..., K], weight [N, K], bias [N] -> [..., N]
    "linear": "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    # over the last dim, computed in fp32; cast "after": x is cast to its dtype, then multiplied by the weight (llama);
    # "before": multiplied in fp32, then cast (gemma). weight [C] or any shape that broadcasts over x
    "norm": "(Tensor x, Tensor? weight, Tensor? bias, str kind='rms', float eps=1e-6, bool plus_one=False,"
    " int groups=1, str cast='after') -> Tensor",
    # alpha * a + beta * b
    "add": "(Tensor a, Tensor b, float alpha=1.0, float beta=1.0) -> Tensor",
    # (sum, norm(sum)): a residual add and the norm that follows it
    "add_norm": "(Tensor a, Tensor b, Tensor? weight, Tensor? bias, float alpha=1.0, float beta=1.0, str kind='rms',"
    " float eps=1e-6, bool plus_one=False, int groups=1, str cast='after') -> (Tensor, Tensor)",
    # alpha * residual + beta * linear(x, weight, bias)
    "linear_add": "(Tensor x, Tensor weight, Tensor? bias, Tensor residual, float alpha=1.0, float beta=1.0) -> Tensor",
    "activation": "(Tensor x, str act) -> Tensor",
    # an activation with four learned parameters, of one element each
    "xielu": "(Tensor x, Tensor alpha_p, Tensor alpha_n, Tensor beta, Tensor eps) -> Tensor",
    # act(gate) * up
    "act_mul": "(Tensor gate, Tensor up, str act) -> Tensor",
    # act(x[..., :n]) * x[..., n:], n = half of the last dim
    "gated_activation": "(Tensor x, str act) -> Tensor",
    # gated_activation(linear(norm(x), weight, bias)); weight [2 n, K] -> [..., n]
    "norm_gated_linear": "(Tensor x, Tensor? norm_weight, Tensor? norm_bias, str kind, float eps, bool plus_one,"
    " int groups, str cast, Tensor weight, Tensor? bias, str act) -> Tensor",
    # clip to [-clip, clip] (0: off), times scale, then softcap * tanh(x / softcap) (0: off)
    "affine": "(Tensor x, float scale=1.0, float softcap=0.0, float clip=0.0) -> Tensor",
    # x [T, H, D], positions [T] int64, table [L, R] fp32 = cos [R/2] ++ sin [R/2]; rotates R of the D channels,
    # the first (at "head") or the last ("tail"); layout "half" | "interleaved" | "half_neg"
    "rope": "(Tensor x, Tensor positions, Tensor table, str layout='half', str at='head', bool inverse=False)"
    " -> Tensor",
    # q [T, H, D] times 1 + beta * log(1 + floor((position + shift) / length))
    "q_temperature": "(Tensor q, Tensor positions, float beta, int length, int shift=0) -> Tensor",
    # x [T, H, D] times act(gate [T, H])
    "gate_heads": "(Tensor x, Tensor gate, str act) -> Tensor",
    # x [T, H, D] -> [T, H / 2, D]: (1 - init) * rms(first half of the heads - lambda * second half)
    "differential": "(Tensor x, Tensor lq1, Tensor lk1, Tensor lq2, Tensor lk2, float init, float eps) -> Tensor",
    # q [T, H, Dk], k [T, K, Dk], v [T, K, Dv], kv [B, L, K, Dk + Dv] -> [T, H, Dv]; causal over each sequence's
    # history; window 0 = unlimited, else a query sees keys at distance < window; sinks [H] are extra logits;
    # chunk 0 = off, else a query sees keys of its own span of `chunk` positions; slopes [H] fp32 (ALiBi): a logit is
    # lowered by slope * distance
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor seq_ids, Tensor positions, Tensor q_starts,"
    " Tensor kv_lens, Tensor? sinks, float scale, int window=0, float softcap=0.0, int chunk=0,"
    " Tensor? slopes=None) -> Tensor",
    # k [T, K, Dk], v [T, K, Dv] -> arena bytes, at page_table[seq_ids, positions // page_tokens] * 256 + layer_offset
    "cache_write": "(Tensor k, Tensor v, Tensor(a!) arena, Tensor page_table, Tensor seq_ids, Tensor positions,"
    " Tensor layer_offset, int page_tokens) -> ()",
    # rope(q), and cache_write(rope(k), v)
    "rope_cache_write": "(Tensor q, Tensor k, Tensor v, Tensor table, Tensor(a!) arena, Tensor page_table,"
    " Tensor seq_ids, Tensor positions, Tensor layer_offset, int page_tokens, str layout='half', str at='head')"
    " -> Tensor",
    # rope_cache_write of norm(q) and norm(k), each over the channels of a head
    "norm_rope_cache_write": "(Tensor q, Tensor k, Tensor v, Tensor? q_norm, Tensor? k_norm, Tensor table,"
    " Tensor(a!) arena, Tensor page_table, Tensor seq_ids, Tensor positions, Tensor layer_offset, int page_tokens,"
    " str layout='half', str at='head', str kind='rms', float eps=1e-6, bool plus_one=False, str cast='after')"
    " -> Tensor",
    # q [T, H, Dk] over the pages of each sequence -> [T, H, Dv]; pages hold q's dtype
    "paged_attention": "(Tensor q, Tensor arena, Tensor page_table, Tensor q_starts, Tensor kv_lens,"
    " Tensor layer_offset, Tensor? sinks, int page_tokens, int kv_heads, int v_dim, float scale, int window=0,"
    " float softcap=0.0, int chunk=0, Tensor? slopes=None) -> Tensor",
    # weight int8 [N, K], scale [N, K / group] float32: w = weight * scale, group along K
    "linear_int8": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int group) -> Tensor",
    # rows of an int8 table as `dtype`, times scale_out rounded to it
    "embed_int8": "(Tensor ids, Tensor weight, Tensor scale, ScalarType dtype, int group, float scale_out=1.0)"
    " -> Tensor",
    # logits [T, E] -> weights [T, k] float32 and ids [T, k] int32 of the experts each token visits, in float32.
    # score "softmax" | "sigmoid" | "sqrtsoftplus" | "none" | "sparsemixer" (needs `jitter`); correction [E] counts in
    # the choice only; expert_scale [E] by the expert chosen. With `always` the last so many experts are visited by all,
    # beside k chosen ones: k + always columns. -3.4e38 stands for minus infinity, which no schema can say
    "route": "(Tensor logits, Tensor? correction, Tensor? expert_scale, int top_k, str score='softmax',"
    " bool score_after_topk=False, int groups=1, int topk_groups=1, str group_score='max', float group_fill=-3.4e38,"
    " bool normalize=False, float norm_eps=0.0, float norm_min=0.0, float scale=1.0, float softcap=0.0,"
    " float jitter=0.0, int always=0) -> (Tensor, Tensor)",
    # x [T, C], weights [T, k], ids [T, k]; up [E, 2 F, C] (gated: F gate rows, then F up rows) or [E, F, C],
    # up_bias [E, 2 F] or [E, F], down [E, C, F], down_bias [E, C] -> [T, C] in x's dtype, sums over experts in fp32.
    # An id outside 0 .. E-1 contributes nothing, whatever its weight. weigh_input: the weight multiplies the expert's
    # input, not its output. limit, alpha, beta, linear_beta: as kernels.experts says
    "experts": "(Tensor x, Tensor weights, Tensor ids, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias,"
    " str act='silu', bool gated=True, float limit=0.0, float alpha=1.702, float beta=0.0, float linear_beta=0.0,"
    " bool weigh_input=False) -> Tensor",
    # the same with int8 matrices and a float32 scale for every `group` input channels of a row
    "experts_int8": "(Tensor x, Tensor weights, Tensor ids, Tensor up, Tensor up_scale, Tensor? up_bias, Tensor down,"
    " Tensor down_scale, Tensor? down_bias, int group, str act='silu', bool gated=True, float limit=0.0,"
    " float alpha=1.702, float beta=0.0, float linear_beta=0.0, bool weigh_input=False) -> Tensor",
    # x [T, C] times the sum of a token's weights whose ids are `first` or more: experts that return their input
    "identity_experts": "(Tensor x, Tensor weights, Tensor ids, int first) -> Tensor",
    # Around a program, on the slots of graph.packet: rows [S, SLOT_WIDTH] int64, table [S, G, M] int32, packet [N]
    # int32. Takes the packet's news into the slots, completes the packet with what decodes read from their slots, and
    # copies the table rows [G, M] of the step's B sequences to page_tables [G, >= B, M], and where their blocks begin
    # to blocks [>= B]
    "begin_step": "(Tensor(a!) rows, Tensor(b!) table, Tensor(c!) packet, Tensor(d!) page_tables, Tensor(e!) blocks,"
    " int num_tokens, int num_seqs, int num_rows) -> ()",
    # sampled [R] int64 -> the slots of the packet's rows, and out [>= R] int64
    "end_step": "(Tensor(a!) rows, Tensor packet, Tensor sampled, Tensor(b!) out, int num_tokens, int num_seqs,"
    " int num_rows) -> ()",
    **recurrent_ops.POINTWISE_SCHEMAS,
    **recurrent_ops.STATE_SCHEMAS,
}


def _same(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _embed(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


def _linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _add_norm(a: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return _same(a), _same(a)


def _gated(x: Tensor, act: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    kind: str,
    eps: float,
    plus_one: bool,
    groups: int,
    cast: str,
    weight: Tensor,
    *_: object,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _differential(x: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2, x.shape[2])


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


def _nothing(*_: object, **__: object) -> None:
    return None


def _paged_attention(
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
    *_: object,
    **__: object,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_dim)


def _embed_int8(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *_: object, **__: object) -> Tensor:
    return scale.new_empty(ids.shape[0], weight.shape[1], dtype=dtype)


def _route(
    logits: Tensor, correction: Tensor | None, expert_scale: Tensor | None, top_k: int, *rest: object, **named: object
) -> tuple[Tensor, Tensor]:
    always = rest[12] if len(rest) > 12 else named.get("always", 0)
    assert isinstance(always, int)
    shape = (logits.shape[0], top_k + always)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


SHAPES: dict[str, Callable[..., object]] = {
    "embed": _embed,
    "add_positions": _same,
    "linear": _linear,
    "norm": _same,
    "add": _same,
    "add_norm": _add_norm,
    "activation": _same,
    "xielu": _same,
    "act_mul": _same,
    "gated_activation": _gated,
    "linear_add": _linear,
    "norm_gated_linear": _norm_gated_linear,
    "affine": _same,
    "rope": _same,
    "q_temperature": _same,
    "gate_heads": _same,
    "differential": _differential,
    "attention": _attention,
    "cache_write": _nothing,
    "rope_cache_write": _same,
    "norm_rope_cache_write": _same,
    "paged_attention": _paged_attention,
    "linear_int8": _linear,
    "embed_int8": _embed_int8,
    "route": _route,
    "experts": _same,
    "experts_int8": _same,
    "identity_experts": _same,
    "begin_step": _nothing,
    "end_step": _nothing,
    **recurrent_ops.SHAPES,
}

WRITES_STATE = frozenset(
    {"attention", "cache_write", "rope_cache_write", "begin_step", "end_step", *recurrent_ops.STATE_SCHEMAS}
)
"""Ops that change an input in place: never removed as dead code, never reordered against a reader of that input."""


def _register(names: Sequence[str]) -> None:
    for name in names:
        _library.define(name + SCHEMAS[name])  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"treadle::{name}", SHAPES[name], lib=_library)


_register(list(SCHEMAS))


def implement(name: str, function: Callable[..., object]) -> None:
    """Make ``function`` what a direct call of ``treadle::name`` runs: its plain-torch reference.

    Raises: RuntimeError if the op already has one, KeyError if there is no such op.
    """
    SCHEMAS[name]
    _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def op(name: str) -> torch._ops.OpOverload:
    """Return the overload of a semantic op, as it stands in graphs."""
    return getattr(NAMESPACE, name).default  # type: ignore[no-any-return]
