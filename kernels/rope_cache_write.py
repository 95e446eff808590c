"""rope_cache_write: rotate queries and keys, store keys and values: rope(q), and cache_write(rope(k), v).

One pass over q, k and v between the projections and the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.cache_write import cache_write, rows_contiguous
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.rope import LAYOUTS, rope
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
) -> Tensor:
    """Write the rotated ``k`` and ``v`` into the arena and return the rotated ``q``.

    Rows at position -1 write nothing. Shapes: q [T, H, Dk]; the others as in ``cache_write`` and ``rope``.
    """
    cache_write(
        rope(k, positions, table, layout, at), v, arena, page_table, seq_ids, positions, layer_offset, page_tokens
    )
    return rope(q, positions, table, layout, at)


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    types = (i, p, n, p, p, n, p, n, p, n, n, i, p, p, n, p, p, p, n, n, n, n, n, n, i)
    return native.function("cache_write", "treadle_rope_cache_write", types)


def rope_cache_write_cpp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    layout: str = "half",
    at: str = "head",
) -> Tensor:
    """Write the rotated ``k`` and ``v``, return the rotated ``q``, in one pass. Shapes: as ``rope_cache_write``."""
    assert page_table.dtype is seq_ids.dtype is torch.int32
    assert positions.dtype is layer_offset.dtype is torch.int64
    q, k, v, table = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), table.contiguous()
    tokens, heads, k_dim = q.shape
    rotated = table.shape[1]
    out = torch.empty((tokens, heads, k_dim), dtype=q.dtype)
    _entry()(
        native.DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        table.data_ptr(),
        rotated,
        0 if at == "head" else k_dim - rotated,
        LAYOUTS.index(layout),
        arena.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        seq_ids.data_ptr(),
        positions.data_ptr(),
        layer_offset.data_ptr(),
        page_tokens,
        tokens,
        heads,
        k.shape[1],
        k_dim,
        v.shape[2],
        torch.get_num_threads(),
    )
    return out


def _plain(target: Target, attrs: Mapping[str, Any]) -> bool:
    """Return whether the angles are fp32 and everything else has one element type that kernels know."""
    dtypes = dtypes_of(target, attrs, "q", "k", "v")
    precise = attrs.get("dtypes", {}).get("table", torch.float32) == torch.float32
    return precise and len(dtypes) == 1 and dtypes <= native.DTYPES.keys()


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _plain(target, attrs) and native.usable("cache_write")


register_reference("rope_cache_write", rope_cache_write, inline=False)
register(
    Kernel(
        op="rope_cache_write",
        name="rope_cache_write.cpp",
        function=define_opaque("rope_cache_write", "cpp", rope_cache_write_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
        invariant=True,
    )
)
register_triton("rope_cache_write", "cache_write_triton", _plain, invariant=True)
