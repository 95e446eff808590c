"""route: which experts a token visits, and how much each counts. In float32 from the logits on.

    s = score(softcap(logits))              with score_after_topk: s = softcap(logits), and score of the chosen
    choice = s + correction                 groups below the best topk_groups get group_fill
    ids = top_k(choice), w = s[ids]
    normalize: w / max(sum w, norm_min), or w / (sum w + norm_eps)
    w * scale * expert_scale[ids]

A group's score is its largest choice ("max") or the sum of its two largest ("top2"). With ``always`` = a, the last a
experts are visited by every token and take part in the normalisation.

"sparsemixer" (arXiv 2409.12136): each expert in turn is the largest logit m of those left, weighed by its share of a
softmax over the logits x with (m - x) / max(|x|, m) <= 2 * jitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.skinny import DTYPES
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "none", "sparsemixer")


def score_logits(logits: Tensor, score: str) -> Tensor:
    """Return the scores of float32 logits, over the last dim. Raises: ValueError for a name that is not known."""
    match score:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits).sqrt()
        case "none":
            return logits
        case _:
            raise ValueError(f"no router score {score!r}; there are {', '.join(SCORES)}")


def route(
    logits: Tensor,
    correction: Tensor | None,
    expert_scale: Tensor | None,
    top_k: int,
    score: str = "softmax",
    score_after_topk: bool = False,
    groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    group_fill: float = -3.4e38,
    normalize: bool = False,
    norm_eps: float = 0.0,
    norm_min: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    jitter: float = 0.0,
    always: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, k + always] float32 and ids [T, k + always] int32. Shapes: logits [T, E], correction [E]."""
    x = logits.float()
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    if score == "sparsemixer":
        weights, ids = _sparsemixer(x, top_k, jitter)
    else:
        scores = x if score_after_topk else score_logits(x, score)
        chosen = scores[:, : scores.shape[1] - always]
        choice = chosen if correction is None else chosen + correction.float()
        if groups > 1:
            choice = _best_groups(choice, groups, topk_groups, group_score, group_fill)
        ids = choice.topk(top_k, -1).indices
        if always:
            rest = torch.arange(chosen.shape[1], scores.shape[1], device=ids.device)
            ids = torch.cat([ids, rest.expand(ids.shape[0], -1)], -1)
        weights = scores.gather(-1, ids)
        if score_after_topk:
            weights = score_logits(weights, score)
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=norm_min) if norm_min else total + norm_eps)
    weights = weights * scale
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return weights, ids.to(torch.int32)


def _best_groups(choice: Tensor, groups: int, kept: int, group_score: str, fill: float) -> Tensor:
    """Return ``choice`` with ``fill`` in all groups but the ``kept`` best."""
    grouped = choice.view(choice.shape[0], groups, choice.shape[1] // groups)
    of_group = grouped.topk(2, -1).values.sum(-1) if group_score == "top2" else grouped.amax(-1)
    keep = torch.zeros_like(of_group).scatter(1, of_group.topk(kept, -1).indices, 1.0)
    return torch.where(keep.unsqueeze(-1) > 0, grouped, fill).flatten(1)


def _sparsemixer(x: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    weights, ids, left = [], [], x
    for _ in range(top_k):
        largest, index = left.max(-1, keepdim=True)
        far = (largest - x) / x.abs().clamp(min=largest) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index))
        ids.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1)


def _in_one_kernel(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "logits") <= DTYPES and attrs.get("score") != "sparsemixer"


register_reference("route", route, inline=True)
register_triton("route", "route_triton", _in_one_kernel, invariant=True)
