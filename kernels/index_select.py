"""index_select: the few keys that each token of a sparse attention sees, at MODEL level.

    keys[b, p] = k                                       append this step's tokens
    score[i, j] = sum_h weights[i, h] * relu(q[i, h] . k[j])     for j <= i, in fp32
    out[i] = the positions of the topk highest scores, ascending; -1 where there are fewer keys

the lightning indexer of DeepSeek-V3.2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp). Of equal scores the earlier
position wins, so that a choice does not depend on how many keys there are behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def highest(scores: Tensor, topk: int) -> Tensor:
    """Return the places of the ``topk`` highest scores of each row, ascending, -1 behind them; -inf is never chosen.

    Shapes: scores [T, S] fp32; result [T, topk] int32.
    """
    count = min(topk, scores.shape[1])
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    nowhere = scores.shape[1]
    order = torch.where(values == float("-inf"), nowhere, order)[:, :count].sort(-1).values
    chosen = torch.where(order == nowhere, -1, order).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - count), value=-1)


def choose(q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, topk: int) -> Tensor:
    """Return the choice of each query of one sequence.

    Shapes: q [T, H, D] at ``positions`` [T]; weights [T, H]; keys [S, D] of positions 0 .. S - 1; result [T, topk].
    """
    products = torch.einsum("thd,sd->ths", q.float(), keys.float()).relu()
    scores = torch.einsum("th,ths->ts", weights.float(), products)
    later = torch.arange(len(keys), device=q.device) > positions.view(-1, 1)
    return highest(scores.masked_fill(later, float("-inf")), topk)


def index_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    keys: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    topk: int,
) -> Tensor:
    """Append ``k`` to ``keys``, then return the choice of every token.

    Rows at position -1 append nothing; they, and sequences with ``kv_lens`` 0, choose nothing.
    Shapes: q [T, H, D]; k [T, D]; weights [T, H]; keys [B, L, 1, D], row = sequence; result [T, topk] int32.
    """
    live = positions >= 0
    keys[seq_ids[live].long(), positions[live], 0] = k[live].to(keys.dtype)
    out = q.new_full((len(q), topk), -1, dtype=torch.int32)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if length and rows.start != rows.stop:
            out[rows] = choose(q[rows], weights[rows], keys[sequence, :length, 0], positions[rows], topk)
    return out


register_reference("index_select", index_select, inline=False)
