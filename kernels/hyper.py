"""hyper_open, hyper_pre, hyper_post, hyper_close: N residual streams that sublayers read as a sum of their own.

Hyper-connections (Zhu et al., https://arxiv.org/abs/2409.19606), in two kinds. With f = rms(all streams as one row):

    pre, post, comb = scale * (fn f) + base, of N, N and N x N channels
    x      = sum_n (sigmoid(pre) + eps)[n] * streams[n]                     what a sublayer reads
    mhc        streams[k] = 2 sigmoid(post)[k] * y + sum_j comb[j, k] * streams[j]
               comb: softmax over k, + eps, then rows and columns divided by their sums + eps, ``iters`` times
    diagonal   streams[k] = (magnitude * sigmoid(post) + eps)[k] * y + streams[k]

The weights are float32 from the norm on (transformers: DeepseekV4, HYV4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference

KINDS = ("mhc", "diagonal")


def hyper_open(x: Tensor, streams: int) -> Tensor:
    """Return ``x`` as every one of the streams. Shapes: x [T, C]; result [T, N, C]."""
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous()


def hyper_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, kind: str, iters: int, eps: float, norm_eps: float,
    magnitude: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the sublayer reads [T, C], and what ``hyper_post`` spreads its result by: float32 [T, W].

    Shapes: streams [T, N, C]; fn [M, N * C]; base [M]. Raises: ValueError for an unknown ``kind``.
    """
    if kind not in KINDS:
        raise ValueError(f"hyper_pre: kind={kind!r} is not one of {', '.join(KINDS)}")
    count = streams.shape[1]
    mixed = _mixed(streams, fn, norm_eps)
    base, scale = base.float(), scale.float()
    pre = torch.sigmoid(mixed[:, :count] * scale[0] + base[:count]) + eps
    post = torch.sigmoid(mixed[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    if kind == "diagonal":
        return _weighed(streams, pre), magnitude * post + eps
    comb = (mixed[:, 2 * count :] * scale[2] + base[2 * count :]).view(-1, count, count).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return _weighed(streams, pre), torch.cat([2 * post, comb.flatten(1)], -1)


def hyper_post(y: Tensor, streams: Tensor, spread: Tensor) -> Tensor:
    """Return the streams behind a sublayer. Shapes: y [T, C]; streams [T, N, C]; spread [T, N] or [T, N + N * N]."""
    count = streams.shape[1]
    if spread.shape[1] == count:
        return (spread.unsqueeze(-1) * y.float().unsqueeze(1) + streams.float()).to(streams.dtype)
    spread = spread.to(streams.dtype)
    added = spread[:, :count].unsqueeze(-1) * y.unsqueeze(1)
    comb = spread[:, count:].view(-1, count, count)
    # N is small: a sum of N products, where a library would multiply T tiny matrices
    return added + (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)


def hyper_close(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Return the sum of the streams that the final norm reads. Shapes: streams [T, N, C]; result [T, C]."""
    weights = torch.sigmoid(_mixed(streams, fn, norm_eps) * scale.float() + base.float()) + eps
    return _weighed(streams, weights)


def _mixed(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).float()
    flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm_eps)
    return F.linear(flat, fn.float())


def _weighed(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


register_reference("hyper_open", hyper_open, inline=True)
register_reference("hyper_pre", hyper_pre, inline=True, invariant=False)
register_reference("hyper_post", hyper_post, inline=True)
register_reference("hyper_close", hyper_close, inline=True, invariant=False)
