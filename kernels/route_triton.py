"""Triton kernel of route: a program routes a few tokens, whole rows of logits in registers, without sorting them.

A choice becomes an int64 whose upper half orders it as its fp32 value does (NaN as infinity) and whose lower half
prefers the lower id, so that one maximum finds the best expert and breaks ties; a round for each of the k experts.
Where neither a correction nor groups count, the logits themselves are the choice: every score grows with them.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.kernels.activation_triton import tanh
from treadle.kernels.skinny import launch_options

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "none")
"""What the kernel knows; sparsemixer is left to the reference."""

TILE = 1024
"""Logits that a program should have at least."""

_INF = tl.constexpr(float("inf"))
_TAKEN = tl.constexpr(-(1 << 63))
"""Below the key of any choice."""


@triton.jit
def _keys(values, places):
    """Return int64 that are ordered as fp32 ``values`` are, the lower of equal ``places`` first."""
    values = tl.where(values != values, _INF, tl.where(values == 0, 0.0, values))
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place(key):
    """Return the place that went into a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _capped(logits, at, mask, softcap, SOFTCAP: tl.constexpr):
    x = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    if SOFTCAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def _pointwise(x, SCORE: tl.constexpr):
    """Return the scores that depend on their own logit alone."""
    if SCORE == "sigmoid":
        y = tl.sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        # log1p(e) = log(u) e / (u - 1) with u = 1 + e rounded: small scores keep their digits
        e = tl.exp(tl.where(x > 20.0, 20.0, x))
        u = 1.0 + e
        y = tl.sqrt(tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))))
    else:
        tl.static_assert(SCORE == "none", "no such score")
        y = x
    return y


@triton.jit
def _scores(x, live, largest, total, SCORE: tl.constexpr):
    """Return the scores of logits [R, *], 0 where not live; ``largest`` and ``total`` [R] are softmax's."""
    if SCORE == "softmax":
        y = tl.exp(tl.where(live, x - largest[:, None], 0.0)) / total[:, None]
    else:
        y = _pointwise(x, SCORE)
    return tl.where(live, y, 0.0)


@triton.jit
def _keep_groups(
    choice, live, groups, topk_groups, fill, TOP2: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Return ``choice`` [R, GP * SP] with ``fill`` in all groups but the best."""
    grouped = tl.reshape(tl.where(live, tl.where(choice != choice, _INF, choice), -_INF), (R, GP, SP))
    score = tl.max(grouped, 2)
    if TOP2:
        inside = tl.arange(0, SP)[None, None, :]
        first = tl.min(tl.where(grouped == score[:, :, None], inside, SP), 2)
        score += tl.max(tl.where(inside == first[:, :, None], -_INF, grouped), 2)
    g = tl.arange(0, GP)[None, :]
    keys = tl.where(g < groups, _keys(score, g + tl.zeros([R, GP], tl.int32)), _TAKEN)
    kept = tl.zeros([R, GP], tl.int1)
    for _ in range(topk_groups):
        best = tl.max(keys, 1)[:, None]
        kept = kept | (keys == best)
        keys = tl.where(keys == best, _TAKEN, keys)
    wide = tl.reshape(tl.broadcast_to(kept[:, :, None], (R, GP, SP)), (R, GP * SP))
    return tl.where(wide, choice, fill)


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits, correction, expert_scale, weights, ids, row_stride, rows, chosen, groups, topk_groups, fill, norm_eps,
    norm_min, scale, softcap,
    TOP_K: tl.constexpr, ALWAYS: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, CORRECT: tl.constexpr,
    GROUPS: tl.constexpr, TOP2: tl.constexpr, NORMALIZE: tl.constexpr, LEAST: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
    AP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows lie in registers as GP groups of SP places each; ``chosen`` experts take part in the choice."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    row = (r.to(tl.int64) * row_stride)[:, None]
    place = tl.arange(0, GP * SP)
    size = chosen // groups
    expert = place // SP * size + place % SP
    inside = (place % SP < size) & (place // SP < groups)
    live = (r < rows)[:, None] & inside[None, :]
    shift = tl.zeros([GP * SP], tl.float32)
    if CORRECT:
        shift = tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = _capped(logits, row + expert[None, :], live, softcap, SOFTCAP)
    largest = tl.zeros([R], tl.float32)
    total = tl.full([R], 1.0, tl.float32)
    if SCORE == "softmax" and not AFTER:
        largest = tl.max(tl.where(live, x, -_INF), 1)
        a = tl.arange(0, AP)
        if ALWAYS > 0:
            there = (r < rows)[:, None] & (a < ALWAYS)[None, :]
            rest = _capped(logits, row + (chosen + a)[None, :], there, softcap, SOFTCAP)
            largest = tl.maximum(largest, tl.max(tl.where(there, rest, -_INF), 1))
        total = tl.sum(tl.where(live, tl.exp(x - largest[:, None]), 0.0), 1)
        if ALWAYS > 0:
            total += tl.sum(tl.where(there, tl.exp(rest - largest[:, None]), 0.0), 1)
        total = tl.where(r < rows, total, 1.0)
    choice = x
    if CORRECT or GROUPS:
        if not AFTER:
            choice = _scores(x, live, largest, total, SCORE)
        if CORRECT:
            choice += shift[None, :]
    if GROUPS:
        choice = _keep_groups(choice, live, groups, topk_groups, fill, TOP2, R, GP, SP)
    keys = tl.where(live, _keys(choice, expert[None, :] + tl.zeros([R, GP * SP], tl.int32)), _TAKEN)
    j = tl.arange(0, KP)[None, :]
    found = (chosen - TOP_K + j) + tl.zeros([R, KP], tl.int32)
    for i in range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        found = tl.where(j == i, _place(best), found)
        keys = tl.where(keys == best, _TAKEN, keys)
    mask = (r < rows)[:, None] & (j < TOP_K + ALWAYS)
    v = _capped(logits, row + found, mask, softcap, SOFTCAP)
    if AFTER and SCORE == "softmax":
        largest = tl.max(tl.where(mask, v, -_INF), 1)
        total = tl.where(r < rows, tl.sum(tl.where(mask, tl.exp(v - largest[:, None]), 0.0), 1), 1.0)
    v = _scores(v, mask, largest, total, SCORE)
    if NORMALIZE:
        whole = tl.sum(v, 1)
        whole = tl.where(whole < norm_min, norm_min, whole) if LEAST else whole + norm_eps
        v = v / tl.where(r < rows, whole, 1.0)[:, None]
    v = v * scale
    if SCALED:
        v = v * tl.load(expert_scale + found, mask=mask, other=0.0).to(tl.float32)
    at = r.to(tl.int64)[:, None] * (TOP_K + ALWAYS) + j
    tl.store(weights + at, v, mask=mask)
    tl.store(ids + at, found, mask=mask)


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
    jitter: float = 0.0,  # noqa: ARG001  (the op's signature; sparsemixer's)
    always: int = 0,
    *,
    pdl: bool = False,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights and ids, of equal choices the lower id first. Shapes: as the reference's.

    ``invariant``: in blocks that do not depend on the number of tokens.
    """
    rows, experts = logits.shape
    weights = logits.new_empty((rows, top_k + always), dtype=torch.float32)
    ids = logits.new_empty((rows, top_k + always), dtype=torch.int32)
    if weights.numel() == 0:
        return weights, ids
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    chosen = experts - always
    padded_groups = triton.next_power_of_2(groups)
    size = triton.next_power_of_2(chosen // groups)
    columns = padded_groups * size
    each = max(1, TILE // columns if invariant else min(TILE // columns, triton.next_power_of_2(rows)))
    _route[(triton.cdiv(rows, each),)](
        logits, logits if correction is None else correction.contiguous(),
        logits if expert_scale is None else expert_scale.contiguous(), weights, ids,
        logits.stride(0), rows, chosen, groups, topk_groups, group_fill, norm_eps, norm_min, scale, softcap,
        TOP_K=top_k, ALWAYS=always, SCORE=score, AFTER=score_after_topk, CORRECT=correction is not None,
        GROUPS=groups > 1, TOP2=group_score == "top2", NORMALIZE=normalize, LEAST=norm_min > 0,
        SCALED=expert_scale is not None, SOFTCAP=softcap != 0, R=each, GP=padded_groups, SP=size,
        KP=triton.next_power_of_2(top_k + always), AP=triton.next_power_of_2(max(always, 1)), PDL=pdl,
        num_warps=1 if each * columns <= 256 else 2 if each * columns <= 512 else 4, **launch_options(pdl),
    )  # fmt: skip
    return weights, ids
