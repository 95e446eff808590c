"""latent_attention: causal attention of the MODEL level in which all query heads share one key row a token.

    kv[b, p] = k                                         append this step's tokens
    logit[h, i, j] = scale * q[i, h] . k[j]              for j <= i, j < kv_len, i - j < window, j in select[i]
    p = softmax(logits of j ++ sink[h]);  out[i, h] = sum_j p[j] k[j, :v_dim]

All in fp32, rounded once at the end: multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) with
the matrices of keys and values taken into what comes before and behind it. A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def attend(
    q: Tensor, keys: Tensor, positions: Tensor, sinks: Tensor | None, scale: float, v_dim: int, window: int,
    select: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the attention of the queries of one sequence over its keys, in fp32.

    Shapes: q [T, H, D] at ``positions`` [T]; keys [S, D] of positions 0 .. S - 1; select [T, N]; result [T, H, v_dim].
    """
    keys = keys.float()
    length = len(keys)
    distance = positions.view(-1, 1) - torch.arange(length, device=q.device)
    visible = distance >= 0
    if window:
        visible &= distance < window
    if select is not None:
        chosen = select.new_zeros((len(q), length + 1), dtype=torch.bool)
        chosen.scatter_(1, torch.where(select < 0, length, select).long(), True)
        visible &= chosen[:, :length]
    logits = (torch.einsum("thd,sd->ths", q.float(), keys) * scale).masked_fill(~visible.unsqueeze(1), float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(1, -1, 1).expand(len(q), -1, 1)], -1)
    weights = logits.softmax(-1)[..., :length].masked_fill(~visible.any(-1).view(-1, 1, 1), 0.0)
    return torch.einsum("ths,sd->thd", weights, keys[:, :v_dim])


def latent_attention(
    q: Tensor,
    k: Tensor,
    kv: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    v_dim: int,
    window: int = 0,
    select: Tensor | None = None,
) -> Tensor:
    """Append keys to ``kv``, then return the attention of every query over its sequence's history.

    Rows at position -1 append nothing; they, and sequences with ``kv_lens`` 0, give zeros.
    Shapes: q [T, H, D]; k [T, D]; kv [B, L, 1, D], row = sequence; select [T, N] int32; result [T, H, v_dim].
    """
    live = positions >= 0
    kv[seq_ids[live].long(), positions[live], 0] = k[live].to(kv.dtype)
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        chosen = None if select is None else select[rows]
        out[rows] = attend(
            q[rows], kv[sequence, :length, 0], positions[rows], sinks, scale, v_dim, window, chosen
        ).to(q.dtype)  # fmt: skip
    return out


register_reference("latent_attention", latent_attention, inline=False)
