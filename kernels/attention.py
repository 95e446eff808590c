"""attention: causal attention of the MODEL level over a dense history.

    kv[b, p] = k ++ v                                    append this step's tokens
    logit[h, i, j] = cap(scale * q[i, h] . k[j, h // G] - slope[h] * (i - j))    G = H / K
        for j <= i, j < kv_len, i - j < window, i // chunk = j // chunk
    p = softmax(logits of j ++ sink[h]);  out[i, h] = sum_j p[j] v[j, h // G]
    cap(x) = softcap * tanh(x / softcap)

All in fp32, rounded once at the end. ``i`` and ``j`` are positions in the sequence. A sink takes part in the softmax
and contributes nothing (transformers: GptOss). A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float,
    chunk: int = 0, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of the queries of one sequence over its keys, in fp32.

    Shapes: q [T, H, Dk] at ``positions`` [T]; k [S, K, Dk] and v [S, K, Dv] of positions 0 .. S - 1; result [T, H, Dv].
    """
    num_queries, heads, k_dim = q.shape
    length, kv_heads, v_dim = v.shape
    group = heads // kv_heads
    queries = q.float().view(num_queries, kv_heads, group, k_dim).permute(1, 2, 0, 3)
    logits = queries @ k.float().permute(1, 2, 0).unsqueeze(1) * scale
    places = torch.arange(length, device=q.device)
    distance = positions.view(-1, 1) - places
    if slopes is not None:
        logits = logits - slopes.float().view(kv_heads, group, 1, 1) * distance
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    visible = distance >= 0
    if window:
        visible &= distance < window
    if chunk:
        visible &= positions.view(-1, 1) // chunk == places // chunk
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        logits = torch.cat([logits, extra], -1)
    weights = logits.softmax(-1)[..., :length].masked_fill(~visible.any(-1, keepdim=True), 0.0)
    result = weights @ v.float().permute(1, 0, 2).unsqueeze(1)
    return result.permute(2, 0, 1, 3).reshape(num_queries, heads, v_dim)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Append keys and values to ``kv``, then return the attention of every query over its sequence's history.

    Rows at position -1 append nothing; they, and sequences with ``kv_lens`` 0, give zeros.
    Shapes: q [T, H, Dk]; k [T, K, Dk]; v [T, K, Dv]; kv [B, L, K, Dk + Dv], row = sequence; result [T, H, Dv].
    """
    k_dim = k.shape[-1]
    live = positions >= 0
    kv[seq_ids[live].long(), positions[live]] = torch.cat([k, v], -1)[live].to(kv.dtype)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        history = kv[sequence, :length]
        out[rows] = attend(
            q[rows], history[..., :k_dim], history[..., k_dim:], positions[rows], sinks, scale, window, softcap, chunk,
            slopes,
        ).to(q.dtype)  # fmt: skip
    return out


register_reference("attention", attention, inline=False)
