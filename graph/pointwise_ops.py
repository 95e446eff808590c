"""Ops of feed-forwards and routers that only some families have.

``graph.ops`` registers them beside its own. Legend: T tokens, C channels, E experts, k experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SCHEMAS: dict[str, str] = {
    # act_mul with limits and learned forms: as kernels.experts says
    "glu": "(Tensor gate, Tensor up, str act, float limit=0.0, float alpha=1.702, float beta=0.0,"
    " float linear_beta=0.0) -> Tensor",
    # logits [T, E], token_ids [T] int64, table [V, k] int32 -> weights [T, k] float32 and ids [T, k] int32: experts by
    # token, weighed by their scores
    "hash_route": "(Tensor logits, Tensor token_ids, Tensor table, str score='softmax', bool normalize=False,"
    " float norm_eps=0.0, float norm_min=0.0, float scale=1.0) -> (Tensor, Tensor)",
}


def _first(x: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(x.shape)


def _hash_route(logits: Tensor, *rest: object, **_: object) -> tuple[Tensor, Tensor]:
    table = rest[1]
    assert isinstance(table, Tensor)
    shape = (logits.shape[0], table.shape[1])
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


SHAPES: dict[str, Callable[..., object]] = {"glu": _first, "hash_route": _hash_route}
