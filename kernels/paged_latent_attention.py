"""paged_latent_attention: the attention of ``latent_attention`` over keys in the pages of each sequence.

The layout is in ``latent_write``. The n queries of a sequence are its last n tokens: query i stands at position
kv_len - n + i.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.cache_write import elements, rows_contiguous
from treadle.kernels.latent_attention import attend
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def paged_latent_attention(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    scale: float,
    v_dim: int,
    window: int = 0,
    select: Tensor | None = None,
) -> Tensor:
    """Return the attention of every query over its sequence's pages.

    Sequences with ``kv_lens`` 0, and rows past the last sequence, give zeros.
    Shapes: q [T, H, D]; arena bytes [N] uint8, holding q's dtype; page_table [B, M] int32; q_starts [B + 1] int32;
    kv_lens [B] int32; layer_offset one int64 (bytes inside a page); sinks [H]; select [T, N] int32; result
    [T, H, v_dim].
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
        keys, _ = elements(pages, tokens, layer_offset, page_tokens, 1, q.shape[-1], 0, q.element_size())
        chosen = None if select is None else select[rows]
        out[rows] = attend(
            q[rows], cache[keys[:, 0]], tokens[length - num_queries :], sinks, scale, v_dim, window, chosen
        ).to(q.dtype)
    return out


@functools.cache
def _entry() -> Callable[..., None]:
    p, n, i, f = native.POINTER, native.LONG, native.INT, native.FLOAT
    types = (i, p, n, p, p, p, n, p, p, p, p, p, n, n, n, n, n, n, n, f, n, i)
    return native.function("paged_latent_attention", "treadle_paged_latent_attention", types)


def paged_latent_attention_cpp(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    page_tokens: int,
    scale: float,
    v_dim: int,
    window: int = 0,
    select: Tensor | None = None,
) -> Tensor:
    """Return ``paged_latent_attention``'s result by the C++ kernel. Shapes: as ``paged_latent_attention``."""
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    assert select is None or select.dtype is torch.int32
    q = rows_contiguous(q)
    tokens, heads, k_dim = q.shape
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype)
    # Kept by names until the call is over: their pointers are all that C++ has.
    extra = None if sinks is None else sinks.float().contiguous()
    chosen = None if select is None else select.contiguous()
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
        None if chosen is None else chosen.data_ptr(),
        0 if chosen is None else chosen.shape[1],
        kv_lens.shape[0],
        tokens,
        heads,
        k_dim,
        v_dim,
        page_tokens,
        scale,
        window,
        torch.get_num_threads(),
    )
    return out


def _known_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    return dtypes_of(target, attrs, "q") <= native.DTYPES.keys()


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _known_type(target, attrs) and native.usable("paged_latent_attention")


register_reference("paged_latent_attention", paged_latent_attention, inline=False)
register(
    Kernel(
        op="paged_latent_attention",
        name="paged_latent_attention.cpp",
        function=define_opaque("paged_latent_attention", "cpp", paged_latent_attention_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
        invariant=True,
    )
)
register_triton("paged_latent_attention", "latent_attention_launch", _known_type, invariant=True)
