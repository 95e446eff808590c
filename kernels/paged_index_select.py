"""paged_index_select: the choice of ``index_select`` over keys in the pages of each sequence.

The n queries of a sequence are its last n tokens: query i stands at position kv_len - n + i.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.cache_write import elements, rows_contiguous
from treadle.kernels.index_select import choose
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def paged_index_select(
    q: Tensor,
    weights: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    topk: int,
) -> Tensor:
    """Return the choice of every token; rows of no live sequence choose nothing.

    Shapes: q [T, H, D]; weights [T, H]; arena bytes [N] uint8, holding q's dtype; page_table [B, M] int32;
    q_starts [B + 1] int32; kv_lens [B] int32; layer_offset one int64 (bytes inside a page); result [T, topk] int32.
    """
    out = q.new_full((len(q), topk), -1, dtype=torch.int32)
    cache = arena.view(q.dtype)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if length == 0 or num_queries == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        keys, _ = elements(pages, tokens, layer_offset, page_tokens, 1, q.shape[-1], 0, q.element_size())
        out[rows] = choose(q[rows], weights[rows], cache[keys[:, 0]], tokens[length - num_queries :], topk)
    return out


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i = native.POINTER, native.LONG, native.INT
    types = (i, p, n, p, p, p, p, n, p, p, p, n, n, n, n, n, n, i)
    return native.function("paged_index_select", "treadle_paged_index_select", types)


def paged_index_select_cpp(
    q: Tensor,
    weights: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    topk: int,
) -> Tensor:
    """Return ``paged_index_select``'s result by the C++ kernel. Shapes: as ``paged_index_select``."""
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    q = rows_contiguous(q)
    # Kept by its name until the call is over: its pointer is all that C++ has.
    counts = weights.float().contiguous()
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, topk), dtype=torch.int32)
    _entry()(
        native.DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        counts.data_ptr(),
        out.data_ptr(),
        arena.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        q_starts.data_ptr(),
        kv_lens.data_ptr(),
        layer_offset.data_ptr(),
        kv_lens.shape[0],
        tokens,
        heads,
        dim,
        page_tokens,
        topk,
        torch.get_num_threads(),
    )
    return out


def _known_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "q") <= native.DTYPES.keys()


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _known_type(target, attrs) and native.usable("paged_index_select")


register_reference("paged_index_select", paged_index_select, inline=False)
register(
    Kernel(
        op="paged_index_select",
        name="paged_index_select.cpp",
        function=define_opaque("paged_index_select", "cpp", paged_index_select_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
        invariant=True,
    )
)
register_triton("paged_index_select", "paged_index_select_triton", _known_type, invariant=True)
