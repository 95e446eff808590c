"""selective_scan: the state-space recurrence of Mamba, with a decay for every channel and every state of it.

    S = exp(dt[t] A) S + dt[t] x[t] B[t]'
    out[t] = S C[t] + D x[t]

in fp32; S [I, N]. Two steps (a, b) and (a', b') in a row are the step (a' a, a' b + b'), so the steps of a chunk are
joined with those 1, 2, 4, ... before them until each is joined with all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.blocks import Part
from treadle.kernels.registry import register_reference

CHUNK = 64
"""Tokens of a chunk."""


def selective_chunks(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence read, and the state that they leave, all in fp32.

    Shapes: x, dt [T, I]; A [I, N]; B, C [T, N]; state [I, N]; results [T, I] and [I, N].
    """
    out = []
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, start + chunk)
        step = dt[rows].unsqueeze(-1)
        decay = (step * A).exp()
        learned = step * x[rows].unsqueeze(-1) * B[rows].unsqueeze(1)
        reach = 1
        while reach < decay.shape[0]:
            # the new values first: both sides read the old decays
            learned = torch.cat([learned[:reach], decay[reach:] * learned[:-reach] + learned[reach:]])
            decay = torch.cat([decay[:reach], decay[reach:] * decay[:-reach]])
            reach *= 2
        states = decay * state + learned
        out.append((states @ C[rows].unsqueeze(-1)).squeeze(-1))
        state = states[-1]
    return torch.cat(out), state


def selective_scan(
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

    Shapes: x [T, I]; dt [T, I] fp32; A [I, N] fp32; B, C [T, N]; D [I]; result [T, I] in x's dtype; the rest as
    ``graph.recurrent_ops`` says.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    for item in part.live():
        inputs, step, keys, queries = (t[item.rows].float() for t in (x, dt, B, C))
        before = part.read([item], tuple(A.shape), torch.float32)[0]
        y, after = selective_chunks(inputs, step, A.float(), keys, queries, before, CHUNK)
        if D is not None:
            y = y + D.float() * inputs
        out[item.rows] = y.to(x.dtype)
        part.write([item], after.unsqueeze(0))
    return out


register_reference("selective_scan", selective_scan, inline=False)
