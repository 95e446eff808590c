"""ssm_scan on a CPU: ssm_scan.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks_native import entry, pointer, rows_dense, tail, whole


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    return entry("ssm_scan", i, p, n, p, n, p, p, n, p, n, p, p, n, n, n, n, n)


def ssm_scan_cpp(
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
    """Return ``ssm_scan``'s result; bit by bit the same however prompts are cut. Shapes: as ``ssm_scan``."""
    assert dt.dtype is torch.float32
    x, dt, B, C = (rows_dense(each) for each in (x, dt, B, C))
    # Kept by names until the call is over: their pointers are all that C++ has.
    rates, skips = whole(A), whole(D)
    out = torch.empty(x.shape, dtype=x.dtype)
    _entry()(
        native.DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        pointer(rates),
        B.data_ptr(),
        B.stride(0),
        C.data_ptr(),
        C.stride(0),
        pointer(skips),
        out.data_ptr(),
        *x.shape,
        *B.shape[1:],
        *tail(memory, blocks, offset, q_starts, positions, kv_lens),
    )
    return out
