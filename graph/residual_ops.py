"""The ops of residual streams other than one sum: hyper-connections, and mixtures over snapshots.

Legend: T tokens, N streams, C channels, S snapshots. ``graph.ops`` registers them beside its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

SCHEMAS: dict[str, str] = {
    # x [T, C] -> [T, N, C]: every stream starts as the embedding
    "hyper_open": "(Tensor x, int streams) -> Tensor",
    # streams [T, N, C], fn [M, N * C], base [M], scale [3] or [2], all float32 but the first -> what a sublayer reads
    # [T, C], and how its result is spread [T, W] float32. kind "mhc": M = (2 + N) N, W = N + N * N; kind "diagonal":
    # M = 2 N, W = N, and a stream keeps itself alone
    "hyper_pre": "(Tensor streams, Tensor fn, Tensor base, Tensor scale, str kind, int iters, float eps,"
    " float norm_eps, float magnitude) -> (Tensor, Tensor)",
    # y [T, C], streams [T, N, C], spread [T, W] -> [T, N, C]
    "hyper_post": "(Tensor y, Tensor streams, Tensor spread) -> Tensor",
    # streams [T, N, C], fn [N, N * C], base [N], scale [1] -> [T, C]: what the head reads
    "hyper_close": "(Tensor streams, Tensor fn, Tensor base, Tensor scale, float eps, float norm_eps) -> Tensor",
    # bank [T, S, C], x [T, C], norm [C], project [1, C] -> [T, C]: a softmax over snapshots and x
    "res_mix": "(Tensor bank, Tensor x, Tensor norm, Tensor project, float eps) -> Tensor",
}


def _open(x: Tensor, streams: int) -> Tensor:
    return x.new_empty(x.shape[0], streams, x.shape[1])


def _pre(streams: Tensor, fn: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    tokens, count, channels = streams.shape
    return streams.new_empty(tokens, channels), fn.new_empty(tokens, fn.shape[0] - count)


def _close(streams: Tensor, *_: object, **__: object) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


def _second(*given: Tensor, **_: object) -> Tensor:
    return given[1].new_empty(given[1].shape)


SHAPES: dict[str, Callable[..., object]] = {
    "hyper_open": _open,
    "hyper_pre": _pre,
    "hyper_post": _second,
    "hyper_close": _close,
    "res_mix": _second,
}
