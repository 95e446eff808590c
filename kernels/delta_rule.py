"""delta_rule: linear attention whose state forgets by a decay and learns by the delta rule (Gated DeltaNet, KDA).

    S = exp(g[t]) S                              a decay for each head, or for each key channel of it
    S = S + k[t] (beta[t] * (v[t] - S' k[t]))'
    out[t] = scale * S' q[t]

in fp32, per value head; S [Dk, Dv]. Tokens are taken in chunks of n. With c the running sum of g inside a chunk and S
the state before it, all corrections u[t] = beta[t] * (v[t] - ...) solve one triangular system:

    (1 + beta * tril(K, -1)) u = beta * (v - (k exp(c)) S)       K[i, j] = sum_d k[i, d] k[j, d] exp(c[i, d] - c[j, d])
    out = (q exp(c)) S + tril(Q) u                               Q likewise, of q and k
    S   = exp(c[n]) S + (k exp(c[n] - c))' u
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.blocks import Part
from treadle.kernels.registry import register_reference

L2_EPS = 1e-6
CHUNKS = {2: 64, 3: 16}
"""Tokens of a chunk, by the dims of g [H, T] or [H, T, D]: pairs of decays by channel take memory."""


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence read, and the state that they leave, all in fp32.

    Shapes: q, k [H, T, Dk]; v [H, T, Dv]; g [H, T] or [H, T, Dk]; beta [H, T]; state [H, Dk, Dv]; results [H, T, Dv]
    and [H, Dk, Dv].
    """
    out = []
    for start in range(0, v.shape[1], chunk):
        rows = slice(start, start + chunk)
        queries, keys, rate = q[:, rows], k[:, rows], beta[:, rows].unsqueeze(-1)
        # in double: the difference of two large sums may be a small number
        total = g[:, rows].double().cumsum(1)
        decay = total.exp().float()
        left = (total[:, -1:] - total).exp().float()
        if g.ndim == 2:
            decay, left = decay.unsqueeze(-1), left.unsqueeze(-1)
        system = rate * _pairs(keys, keys, total).tril(-1)
        wanted = rate * (v[:, rows] - (keys * decay) @ state)
        learned = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out.append((queries * decay) @ state + _pairs(queries, keys, total) @ learned)
        state = decay[:, -1].unsqueeze(-1) * state + (keys * left).transpose(1, 2) @ learned
    return torch.cat(out, 1), state


def _pairs(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return a[i] . b[j] under the decay from j to i, zero for j > i: [H, n, n]."""
    steps = total.unsqueeze(2) - total.unsqueeze(1)
    later = torch.ones(steps.shape[1:3], dtype=torch.bool, device=a.device).triu(1)
    if total.ndim == 2:
        return (a @ b.transpose(1, 2)) * steps.masked_fill(later, float("-inf")).exp().float()
    decays = steps.masked_fill(later.unsqueeze(-1), float("-inf")).exp().float()
    return torch.einsum("hid,hjd,hijd->hij", a, b, decays)


def unit(x: Tensor) -> Tensor:
    """Return ``x`` with vectors of length one along the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    scale: float,
    l2norm: bool = True,
) -> Tensor:
    """Return what the tokens of every live sequence read, zeros elsewhere, and move their states on.

    Shapes: q, k [T, Hk, Dk]; v [T, Hv, Dv]; g [T, Hv] or [T, Hv, Dk] fp32; beta [T, Hv] fp32; result [T, Hv, Dv] in v's
    dtype; the rest as ``graph.recurrent_ops`` says.
    """
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    heads, shared = v.shape[1], v.shape[1] // k.shape[1]
    for item in part.live():
        queries, keys, values, decay, rate = (t[item.rows].float().transpose(0, 1) for t in (q, k, v, g, beta))
        if l2norm:
            queries, keys = unit(queries), unit(keys)
        queries, keys = (t.repeat_interleave(shared, 0) for t in (queries * scale, keys))
        before = part.read([item], (heads, k.shape[2], v.shape[2]), torch.float32)[0]
        y, after = delta_chunks(queries, keys, values, decay, rate, before, CHUNKS[g.ndim])
        out[item.rows] = y.transpose(0, 1).to(v.dtype)
        part.write([item], after.unsqueeze(0))
    return out


register_reference("delta_rule", delta_rule, inline=False)
