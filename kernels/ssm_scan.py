"""ssm_scan: the state-space recurrence of Mamba-2, whose state decays by one factor a head.

    S = exp(dt[t] A) S + dt[t] x[t] B[t]'
    out[t] = S C[t] + D x[t]

in fp32, per head; S [P, N]. Tokens are taken in chunks. With c the running sum of dt A inside a chunk and S the state
before it:

    out = exp(c) (C S') + M x + D x          M[i, j] = C[i] . B[j] exp(c[i] - c[j]) dt[j] for j <= i
    S   = exp(c[n]) S + (dt exp(c[n] - c) x)' B
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.blocks import Part
from treadle.kernels.registry import register_reference

CHUNK = 64
"""Tokens of a chunk."""


def ssm_chunks(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence read, and the state that they leave, all in fp32.

    Shapes: x [H, T, P]; dt [H, T]; A [H]; B, C [G, T, N]; state [H, P, N]; results [H, T, P] and [H, P, N].
    """
    shared = x.shape[0] // B.shape[0]
    out = []
    for start in range(0, x.shape[1], chunk):
        rows = slice(start, start + chunk)
        inputs, step, keys, queries = x[:, rows], dt[:, rows], B[:, rows], C[:, rows]
        # in double: the difference of two large sums may be a small number
        total = (step * A.view(-1, 1)).double().cumsum(1)
        spans = total.unsqueeze(2) - total.unsqueeze(1)
        later = torch.ones(spans.shape[1:], dtype=torch.bool, device=x.device).triu(1)
        decays = spans.masked_fill(later, float("-inf")).exp().float() * step.unsqueeze(1)
        mixed = (queries @ keys.transpose(1, 2)).repeat_interleave(shared, 0) * decays
        every = queries.repeat_interleave(shared, 0)
        out.append((every @ state.transpose(1, 2)) * total.exp().float().unsqueeze(-1) + mixed @ inputs)
        left = ((total[:, -1:] - total).exp().float() * step).unsqueeze(-1)
        learned = (inputs * left).transpose(1, 2) @ keys.repeat_interleave(shared, 0)
        state = total[:, -1].exp().float().view(-1, 1, 1) * state + learned
    return torch.cat(out, 1), state


def ssm_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
) -> Tensor:
    """Return what the tokens of every live sequence read, zeros elsewhere, and move their states on.

    Shapes: x [T, H, P]; dt [T, H] fp32; A [H] fp32; B, C [T, G, N]; D [H]; result [T, H, P] in x's dtype; the rest as
    ``graph.recurrent_ops`` says.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    for item in part.live():
        inputs, step, keys, queries = (t[item.rows].float().transpose(0, 1) for t in (x, dt, B, C))
        before = part.read([item], (x.shape[1], x.shape[2], B.shape[2]), torch.float32)[0]
        y, after = ssm_chunks(inputs, step, A.float(), keys, queries, before, CHUNK)
        if D is not None:
            y = y + D.float().view(-1, 1, 1) * inputs
        out[item.rows] = y.transpose(0, 1).to(x.dtype)
        part.write([item], after.unsqueeze(0))
    return out


register_reference("ssm_scan", ssm_scan, inline=False)
