"""paged_attention: causal attention of a ragged batch over the pages of each sequence.

The math is that of ``attention``; keys and values come from the arena (the layout is in ``cache_write``). The n queries
of a sequence are its last n tokens: query i stands at position kv_len - n + i.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.attention import attend
from treadle.kernels.cache_write import elements, rows_contiguous
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, if_deterministic, register, register_reference
from treadle.kernels.triton_kernel import register_invariant_triton, register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def paged_attention(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention of every query over its sequence's pages.

    Sequences with ``kv_lens`` 0, and rows past the last sequence, give zeros.
    Shapes: q [T, H, Dk]; arena bytes [N] uint8, holding q's dtype; page_table [B, M] int32; q_starts [B + 1] int32;
    kv_lens [B] int32; layer_offset one int64 (bytes inside a page); sinks and slopes [H]; result [T, H, Dv].
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    cache = arena.view(q.dtype)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if length == 0 or num_queries == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        keys, values = elements(
            pages, tokens, layer_offset, page_tokens, kv_heads, q.shape[-1], v_dim, q.element_size()
        )
        positions = torch.arange(length - num_queries, length, device=q.device)
        out[rows] = attend(
            q[rows], cache[keys], cache[values], positions, sinks, scale, window, softcap, chunk, slopes
        ).to(q.dtype)
    return out


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i, f = native.POINTER, native.LONG, native.INT, native.FLOAT
    types = (i, p, n, p, p, p, n, p, p, p, p, p, n, n, n, n, n, n, n, f, n, n, f, i, i)
    return native.function("paged_attention", "treadle_paged_attention", types)


def paged_attention_cpp(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    slopes: Tensor | None = None,
    *,
    one_way: bool = False,
) -> Tensor:
    """Return ``paged_attention``'s result by the C++ kernel; ``one_way``: alike for chunks of any length.

    Shapes: as ``paged_attention``.
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    q = rows_contiguous(q)
    tokens, heads, k_dim = q.shape
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype)
    # Kept by names until the call is over: their pointers are all that C++ has.
    extra, falling = (None if x is None else x.float().contiguous() for x in (sinks, slopes))
    _entry()(
        native.DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        arena.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        q_starts.data_ptr(),
        kv_lens.data_ptr(),
        layer_offset.data_ptr(),
        None if extra is None else extra.data_ptr(),
        None if falling is None else falling.data_ptr(),
        kv_lens.shape[0],
        tokens,
        heads,
        kv_heads,
        k_dim,
        v_dim,
        page_tokens,
        scale,
        window,
        chunk,
        softcap,
        one_way,
        torch.get_num_threads(),
    )
    return out


def _one_way(*args: Any) -> Tensor:
    return paged_attention_cpp(*args, one_way=True)


def _known_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "q") <= native.DTYPES.keys()


def _plain(target: Target, attrs: Mapping[str, Any]) -> bool:
    """Whether keys are seen by distance alone: the invariant kernel knows neither chunks nor ALiBi's slopes."""
    return _known_type(target, attrs) and not attrs.get("chunk") and "slopes" not in attrs.get("dtypes", {})


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _known_type(target, attrs) and native.usable("paged_attention")


register_reference("paged_attention", paged_attention, inline=False)
register(
    Kernel(
        op="paged_attention",
        name="paged_attention.cpp",
        function=define_opaque("paged_attention", "cpp", paged_attention_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
    )
)
register(
    Kernel(
        op="paged_attention",
        name="paged_attention.cpp_invariant",
        function=define_opaque("paged_attention", "cpp_invariant", _one_way, "cpu"),
        inline=False,
        supports=if_deterministic(_supports),
        priority=11,
        invariant=True,
    )
)
register_triton("paged_attention", "paged_attention_launch", _known_type)
register_invariant_triton("paged_attention", "paged_attention_invariant", _plain)
