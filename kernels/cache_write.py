"""cache_write: store this step's keys and values into the pages of their sequences.

A token at position p of sequence s lives in page j = p // page_tokens, row i = p % page_tokens, at byte

    page_table[s, j] * 256 + layer_offset + (h * page_tokens + i) * Dk * item           keys of head h
    ... + K * page_tokens * Dk * item + (h * page_tokens + i) * Dv * item               values of head h

Rows at position -1 write nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.graph.state import UNIT_BYTES
from treadle.kernels import native
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def elements(
    pages: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    item_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return where the keys and the values of tokens lie, as indices of an arena viewed in elements of ``item_bytes``.

    Shapes: pages [N] (page-table entries) and positions [N] of the tokens; results [N, K, Dk] and [N, K, Dv] int64.
    """
    device = positions.device
    base = (pages.long() * UNIT_BYTES + layer_offset.reshape(()).to(device)) // item_bytes
    heads = torch.arange(kv_heads, device=device).view(1, -1, 1) * page_tokens
    rows = heads + (positions % page_tokens).view(-1, 1, 1)
    base = base.view(-1, 1, 1)
    keys = base + rows * k_dim + torch.arange(k_dim, device=device)
    values = base + kv_heads * page_tokens * k_dim + rows * v_dim + torch.arange(v_dim, device=device)
    return keys, values


def cache_write(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
) -> None:
    """Write ``k`` and ``v`` into the arena.

    Shapes: k [T, K, Dk]; v [T, K, Dv], same dtype as the cache; arena bytes [N] uint8; page_table [B, M] int32;
    seq_ids [T] int32; positions [T] int64; layer_offset one int64 (bytes inside a page).
    """
    live = positions >= 0
    where = positions[live]
    pages = page_table[seq_ids[live].long(), where // page_tokens]
    _, kv_heads, k_dim = k.shape
    keys, values = elements(pages, where, layer_offset, page_tokens, kv_heads, k_dim, v.shape[-1], k.element_size())
    cache = arena.view(k.dtype)
    cache[keys] = k[live]
    cache[values] = v[live]


def rows_contiguous(x: Tensor) -> Tensor:
    """Return ``x`` [T, H, D], copied only if a row's H * D elements are not contiguous (rows may be a slice)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    types = (p, n, p, n, p, p, n, p, p, p, n, n, n, n, n, n, i)
    return native.function("cache_write", "treadle_cache_write", types)


def cache_write_cpp(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
) -> None:
    """Write ``k`` and ``v`` into the arena, in one pass over both. Shapes: as ``cache_write``."""
    assert page_table.dtype is seq_ids.dtype is torch.int32
    assert positions.dtype is layer_offset.dtype is torch.int64
    k, v = rows_contiguous(k), rows_contiguous(v)
    tokens, kv_heads, k_dim = k.shape
    _entry()(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        arena.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        seq_ids.data_ptr(),
        positions.data_ptr(),
        layer_offset.data_ptr(),
        page_tokens,
        tokens,
        kv_heads,
        k_dim,
        v.shape[2],
        k.element_size(),
        torch.get_num_threads(),
    )


def _one_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    return len(dtypes_of(target, attrs, "k", "v")) == 1


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _one_type(target, attrs) and native.usable("cache_write")


register_reference("cache_write", cache_write, inline=False)
register(
    Kernel(
        op="cache_write",
        name="cache_write.cpp",
        function=define_opaque("cache_write", "cpp", cache_write_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
        invariant=True,
    )
)
register_triton("cache_write", "cache_write_triton", _one_type, invariant=True)
