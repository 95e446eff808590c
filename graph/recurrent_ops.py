"""Ops whose state has a fixed size (linear attention, state spaces, convolutions), and the ops that go with them.

Each of them ends with the same inputs, that say where a part of a sequence's block lies and which tokens belong to it:

- memory, uint8: [B, bytes], row = sequence (MODEL level), or [A], the arena: sequence b's part begins at byte
  blocks[b] * 256 + offset[0] (the other levels);
- blocks [B] int32, offset [1] int64, q_starts [B + 1] int32, positions [T] int64, kv_lens [B] int32.

The state of sequence b goes through its rows q_starts[b] .. q_starts[b + 1] in order and is written back. It begins as
zeros, whatever memory holds, where the first of these rows is at position 0. A sequence with kv_lens[b] = 0, or without
rows, is neither read nor written; rows of no live sequence may hold anything, and their results are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PART = "Tensor(a!) memory, Tensor blocks, Tensor offset, Tensor q_starts, Tensor positions, Tensor kv_lens"

POINTWISE_SCHEMAS: dict[str, str] = {
    # x times y; x [T, C], y [T, C] or [C]
    "multiply": "(Tensor x, Tensor y) -> Tensor",
    # norm(x) * act(gate), or norm(x * act(gate)) with gate_first; over the last dim as `norm`, the gate in fp32
    "gated_norm": "(Tensor x, Tensor gate, Tensor? weight, Tensor? bias, str kind='rms', float eps=1e-6,"
    " bool plus_one=False, int groups=1, str cast='after', str act='silu', bool gate_first=False) -> Tensor",
    # softplus(x + bias) within [low, high], in float32: x [T, C], bias [C]
    "time_step": "(Tensor x, Tensor? bias, float low=0.0, float high=3.4e38) -> Tensor",
    # float32 logarithm of a decay: A * softplus(x + bias); with a floor: floor * sigmoid(-A * (x + bias)).
    # x [T, H] or [T, H, D], bias of the last dims of x, A [H] float32, negative
    "log_decay": "(Tensor x, Tensor A, Tensor bias, float floor=0.0) -> Tensor",
}
"""Ops that look at each token alone."""

STATE_SCHEMAS: dict[str, str] = {
    # causal, each channel apart: act(bias + sum_j weight[c, j] * x[t - K + 1 + j, c]); x [T, C], weight [C, K];
    # state [K - 1, C] in x's dtype: the last K - 1 inputs, oldest first
    "conv1d": f"(Tensor x, Tensor weight, Tensor? bias, {PART}, str act='none') -> Tensor",
    # q, k [T, Hk, Dk], v [T, Hv, Dv], g [T, Hv] or [T, Hv, Dk] float32, beta [T, Hv] float32 -> [T, Hv, Dv].
    # S [Hv, Dk, Dv] float32: S = exp(g) S; S = S + k (beta * (v - S' k))'; out = scale * S' q. Value head h reads key
    # head h // (Hv / Hk). l2norm: q and k are divided by their length first, eps 1e-6 inside of the root
    "delta_rule": f"(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, {PART}, float scale, bool l2norm=True)"
    " -> Tensor",
    # x [T, H, P], dt [T, H] float32, A [H] float32, B, C [T, G, N], D [H] -> [T, H, P]. S [H, P, N] float32:
    # S = exp(dt A) S + dt x B'; out = S C + D x. Head h reads group h // (H / G)
    "ssm_scan": f"(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, {PART}) -> Tensor",
    # x, dt [T, I] (dt float32), A [I, N] float32, B, C [T, N], D [I] -> [T, I]. S [I, N] float32:
    # S = exp(dt A) S + dt x B'; out = S C + D x
    "selective_scan": f"(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, {PART}) -> Tensor",
}
"""Ops that keep a part of their sequence's block."""


def _like(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _float32(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def _like_third(*given: Tensor, **__: object) -> Tensor:
    return _like(given[2])


SHAPES: dict[str, Callable[..., object]] = {
    "multiply": _like,
    "gated_norm": _like,
    "time_step": _float32,
    "log_decay": _float32,
    "conv1d": _like,
    "delta_rule": _like_third,
    "ssm_scan": _like,
    "selective_scan": _like,
}
