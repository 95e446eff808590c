"""conv1d on a CPU: conv1d.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks_native import entry, pointer, rows_dense, tail

MOST_TAPS = 128
"""A run of tokens is at least as long, so that only the first needs what was before the step."""

ACTIVATIONS = ("none", "silu")


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return entry("conv1d", i, p, n, p, p, p, n, n, n, i)


def conv1d_cpp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    act: str = "none",
) -> Tensor:
    """Return ``conv1d``'s result; bit by bit the same however prompts are cut. Shapes: as ``conv1d``.

    Raises: ValueError for more than MOST_TAPS taps.
    """
    assert weight.dtype is x.dtype
    assert act in ACTIVATIONS
    rows, channels = x.shape
    weight, taps = weight.contiguous(), weight.shape[1]
    if taps > MOST_TAPS:
        raise ValueError(f"conv1d with {taps} taps: the C++ kernel has at most {MOST_TAPS}")
    x, bias = rows_dense(x), None if bias is None else bias.contiguous()
    out = torch.empty((rows, channels), dtype=x.dtype)
    _entry()(
        native.DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        rows,
        channels,
        taps,
        act == "silu",
        *tail(memory, blocks, offset, q_starts, positions, kv_lens),
    )
    return out
