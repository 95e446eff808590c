"""delta_rule on a CPU: delta_rule.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.blocks_native import entry, rows_dense, tail


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i, f = native.POINTER, native.LONG, native.INT, native.FLOAT
    return entry("delta_rule", i, p, n, p, n, p, n, p, n, p, n, p, n, n, n, n, n, f, i, i)


def delta_rule_cpp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    scale: float,
    l2norm: bool = True,
) -> Tensor:
    """Return ``delta_rule``'s result; bit by bit the same however prompts are cut. Shapes: as ``delta_rule``."""
    assert g.dtype is beta.dtype is torch.float32
    q, k, v, g, beta = (rows_dense(x) for x in (q, k, v, g, beta))
    rows, heads, v_dim = v.shape
    out = torch.empty((rows, heads, v_dim), dtype=v.dtype)
    _entry()(
        native.DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        g.data_ptr(),
        g.stride(0),
        beta.data_ptr(),
        beta.stride(0),
        out.data_ptr(),
        rows,
        heads,
        k.shape[1],
        k.shape[2],
        v_dim,
        scale,
        g.dim() == 3,
        l2norm,
        *tail(memory, blocks, offset, q_starts, positions, kv_lens),
    )
    return out
