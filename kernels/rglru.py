"""rglru: the real-gated linear recurrent unit (De et al., https://arxiv.org/abs/2402.19427).

    a = exp(-8 softplus(param) sigmoid(a_gate + a_bias));  m = sqrt(1 - a^2), 1 at the sequence's first token
    s = a s + m sigmoid(in_gate + in_bias) x;  out = s

Gates in the dtype of x, the recurrence in fp32. It is solved for all tokens at once in log2(T) rounds: with (A, z) of
the 2^r tokens up to each, those of twice as many are (A' A, A z' + z), A' and z' of the tokens before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks import Part
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def scan_linear(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Return s[t] = decay[t] s[t - 1] + added[t], s[-1] = ``state``. Shapes: [T, C], [T, C], [C]; result [T, C]."""
    total = torch.cat([(decay[:1] * state + added[:1]), added[1:]])
    kept = decay.clone()
    span = 1
    while span < len(total):
        # both read what the round before left
        total = torch.cat([total[:span], total[span:] + kept[span:] * total[:-span]])
        kept = torch.cat([kept[:span], kept[span:] * kept[:-span]])
        span *= 2
    return total


def rglru(
    x: Tensor, in_gate: Tensor, a_gate: Tensor, in_bias: Tensor, a_bias: Tensor, param: Tensor, memory: Tensor,
    blocks: Tensor, offset: Tensor, q_starts: Tensor, positions: Tensor, kv_lens: Tensor,
) -> Tensor:  # fmt: skip
    """Return the states of every live sequence after each token, zeros elsewhere, and move them on.

    Shapes: x, in_gate, a_gate [T, C]; in_bias, a_bias, param [C]; result [T, C] in x's dtype; the rest as
    ``graph.scan_ops`` says.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    for item in part.live():
        rows = item.rows
        log_a = -8.0 * torch.sigmoid(a_gate[rows] + a_bias).float() * F.softplus(param.float())
        gated = (x[rows] * torch.sigmoid(in_gate[rows] + in_bias)).float()
        share = torch.sqrt(1 - torch.exp(2 * log_a))
        if item.fresh:
            share[0] = 1.0
        (before,) = part.read([item], (x.shape[1],), torch.float32)
        states = scan_linear(log_a.exp(), gated * share, before)
        out[rows] = states.to(x.dtype)
        part.write([item], states[-1:])
    return out


def _of_known_types(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "x", "in_gate", "a_gate", "in_bias", "a_bias", "param") <= native.DTYPES.keys()


register_reference("rglru", rglru, inline=False)
register_triton("rglru", "rglru_triton", _of_known_types, invariant=True)
