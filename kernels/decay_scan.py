"""decay_scan: linear attention whose state decays by one fixed factor a head (Lightning attention, MiniMax).

    S = exp(rate) S + v[t] k[t]';  out[t] = S q[t]

in fp32. Tokens are taken in chunks: with S the state before a chunk and i, j counted from 1 inside it,

    out[i] = exp(rate i) S q[i] + sum_{j <= i} exp(rate (i - j)) (q[i] . k[j]) v[j]
    S      = exp(rate n) S + sum_j exp(rate (n - j)) v[j] k[j]'
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

CHUNK = 64
"""Tokens of a chunk."""


def decay_chunks(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence read, and the state that they leave, all in fp32.

    Shapes: q, k, v [H, T, D]; rates [H], negative; state [H, D, D]; results [H, T, D] and [H, D, D].
    """
    out, rates = [], rates.view(-1, 1)
    for start in range(0, q.shape[1], chunk):
        queries, keys, values = (t[:, start : start + chunk] for t in (q, k, v))
        places = torch.arange(queries.shape[1], device=q.device)
        spans = places.view(-1, 1) - places
        near = torch.exp(rates.unsqueeze(-1) * spans.clamp(min=0)).masked_fill(spans < 0, 0.0)
        old = torch.exp(rates * (places + 1)).unsqueeze(-1)
        out.append(((queries @ keys.transpose(1, 2)) * near) @ values + (queries * old) @ state.transpose(1, 2))
        left = torch.exp(rates * places.flip(0)).unsqueeze(-1)
        state = torch.exp(rates * len(places)).unsqueeze(-1) * state + values.transpose(1, 2) @ (keys * left)
    return torch.cat(out, 1), state


def decay_scan(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, memory: Tensor, blocks: Tensor, offset: Tensor, q_starts: Tensor,
    positions: Tensor, kv_lens: Tensor,
) -> Tensor:  # fmt: skip
    """Return what the tokens of every live sequence read, zeros elsewhere, and move their states on.

    Shapes: q, k, v [T, H, D]; rates [H] fp32; result [T, H, D] in q's dtype; the rest as ``graph.scan_ops`` says.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    heads, dim = q.shape[1:]
    for item in part.live():
        queries, keys, values = (t[item.rows].float().transpose(0, 1) for t in (q, k, v))
        (before,) = part.read([item], (heads, dim, dim), torch.float32)
        y, after = decay_chunks(queries, keys, values, rates.float(), before)
        out[item.rows] = y.transpose(0, 1).to(q.dtype)
        part.write([item], after.unsqueeze(0))
    return out


def _of_known_types(target: Target, attrs: Mapping[str, Any]) -> bool:
    inputs = dtypes_of(target, attrs, "q", "k", "v")
    fp32 = dtypes_of(target, attrs, "rates") == {torch.float32}
    return fp32 and len(inputs) == 1 and inputs <= native.DTYPES.keys()


register_reference("decay_scan", decay_scan, inline=False)
register_triton("decay_scan", "decay_scan_triton", _of_known_types, invariant=True)
