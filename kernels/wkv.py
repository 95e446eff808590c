"""wkv: the time mixing of RWKV-4 (Peng et al., https://arxiv.org/abs/2305.13048), by channel.

    out[t] = (sum_{j < t} e^(k[j] - (t - 1 - j) w) v[j] + e^(k[t] + first) v[t]) / (the same with 1 for v)

w = exp(decay). Sums are kept as (a, b, m): numerator and denominator divided by e^m, so that nothing overflows, in
fp32. Those before every token are found in log2(T) rounds: sums of 2^r tokens up to each, then of twice as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks import Part
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target

LOWEST = -1e38
"""the exponent of no tokens at all"""


def sums(k: Tensor, v: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """Return the sums up to and with each token, those before the first in front.

    Shapes: k, v [T, C]; rate [C] > 0; state [3, C]; result [3, T + 1, C].
    """
    made = torch.cat([state.unsqueeze(1), torch.stack([v, torch.ones_like(v), k])], 1)
    span = 1
    while span < made.shape[1]:
        old, new = made[:, :-span], made[:, span:]
        shifted = old[2] - span * rate
        largest = torch.maximum(shifted, new[2])
        before, now = torch.exp(shifted - largest), torch.exp(new[2] - largest)
        joined = torch.stack([old[0] * before + new[0] * now, old[1] * before + new[1] * now, largest])
        made = torch.cat([made[:, :span], joined], 1)
        span *= 2
    return made


def wkv(
    k: Tensor, v: Tensor, decay: Tensor, first: Tensor, memory: Tensor, blocks: Tensor, offset: Tensor,
    q_starts: Tensor, positions: Tensor, kv_lens: Tensor,
) -> Tensor:  # fmt: skip
    """Return the means of every live sequence's values, zeros elsewhere, and move their states on.

    Shapes: k, v [T, C]; decay, first [C]; result [T, C] in k's dtype; the rest as ``graph.scan_ops`` says.
    """
    out = torch.zeros_like(k, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    rate, extra = decay.float().exp(), first.float()
    for item in part.live():
        keys, values = k[item.rows].float(), v[item.rows].float()
        (before,) = part.read([item], (3, k.shape[1]), torch.float32)
        if item.fresh:
            before[2] = LOWEST
        made = sums(keys, values, rate, before)
        a, b, m = made[:, :-1]
        largest = torch.maximum(m, keys + extra)
        old, own = torch.exp(m - largest), torch.exp(keys + extra - largest)
        out[item.rows] = ((old * a + own * values) / (old * b + own)).to(k.dtype)
        part.write([item], made[:, -1].unsqueeze(0))
    return out


def _of_known_types(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "k", "v", "decay", "first") <= native.DTYPES.keys()


register_reference("wkv", wkv, inline=False)
register_triton("wkv", "wkv_triton", _of_known_types, invariant=True)
