"""Recurrences of single families: linear attention with a fixed decay, gated linear units, RWKV.

They end with the inputs that ``graph.recurrent_ops`` describes, and keep its rules. ``graph.ops`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treadle.graph.recurrent_ops import PART

SCHEMAS: dict[str, str] = {
    # q, k, v [T, H, D], rates [H] float32, < 0 -> [T, H, D]. S [H, D, D] float32: S = exp(rate) S + v k'; out = S q
    "decay_scan": f"(Tensor q, Tensor k, Tensor v, Tensor rates, {PART}) -> Tensor",
    # x, in_gate, a_gate [T, C], in_bias, a_bias, param [C] -> [T, C]. s [C] float32: s = a s + m sigmoid(in_gate) x,
    # a = exp(-8 softplus(param) sigmoid(a_gate)), m = sqrt(1 - a^2), 1 at position 0
    "rglru": f"(Tensor x, Tensor in_gate, Tensor a_gate, Tensor in_bias, Tensor a_bias, Tensor param, {PART})"
    " -> Tensor",
    # x [T, C] -> the row before each, zeros at position 0; state [C] in x's dtype
    "token_shift": f"(Tensor x, {PART}) -> Tensor",
    # x * share + before * (1 - share): x, before [T, C], share [C]
    "blend": "(Tensor x, Tensor before, Tensor share) -> Tensor",
    # k, v [T, C], decay, first [C] float32 -> [T, C]: a mean of values weighed by exp(k + what decays by -exp(decay) a
    # token), the token's own by exp(k + first); state [3, C] float32: sum, weight, largest exponent
    "wkv": f"(Tensor k, Tensor v, Tensor decay, Tensor first, {PART}) -> Tensor",
}
STATE_SCHEMAS = {name: schema for name, schema in SCHEMAS.items() if name != "blend"}
"""Ops that keep a part of their sequence's block."""


def _like(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


SHAPES: dict[str, Callable[..., object]] = dict.fromkeys(SCHEMAS, _like)
