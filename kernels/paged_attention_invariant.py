"""Launches paged_attention such that a query's result depends on its position and history alone.

One kernel with one size of tiles serves decodes and chunks of any length; whether its programs share the spans of a
history, which depends on the size of the step, changes no bit: see paged_attention_invariant_triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.state import UNIT_BYTES
from treadle.graph.workspace import PARTIAL_BYTES
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment
from treadle.kernels.paged_attention_invariant_triton import attend, join

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SPAN = 256
"""Keys that are added up from the start, at multiples of as many."""
JOINED = 8
"""Spans that are read at a time to be joined."""


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
    *,
    pdl: bool = False,
    split: bool | None = None,
) -> Tensor:
    """Return ``paged_attention``'s result; ``split`` replaces the choice whether programs share a history.

    Shapes: as the reference. Chunks and slopes are not for this kernel.
    """
    assert not chunk
    assert slopes is None
    return launch(
        q, arena, page_table, q_starts, kv_lens, layer_offset, sinks, None, page_tokens, kv_heads, v_dim, scale, window,
        softcap, pdl=pdl, split=split,
    )  # fmt: skip


def launch(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    pdl: bool = False,
    invariant: bool = True,
    split: bool | None = None,
) -> Tensor:
    """Return attention over pages, with a bias by distance if there is one.

    ``invariant`` False: tiles and spans are as large as suits the step. Shapes: as the reference; bias [T, H, E].
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    q, bias = rows_contiguous(q), None if bias is None else rows_contiguous(bias)
    tokens, heads, k_dim = q.shape
    sequences, item_bytes, group = kv_lens.shape[0], q.element_size(), heads // kv_heads
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    few = not invariant and tokens <= sequences
    rows, tiles = _tiles(max(_padded(k_dim), _padded(v_dim)), item_bytes, group, few)
    if bias is not None and rows > 16:
        # Four warps spill registers beside a tile's bias.
        tiles["num_warps"] = 8
    in_tile = rows // group
    count = tokens // in_tile + sequences + 1
    alone = count * kv_heads >= 2 * _processors(q.device)
    reach = page_table.shape[1] * page_tokens
    if window:
        reach = min(reach, window + in_tile - 1)
    row_bytes = tokens * heads * (v_dim + 2) * 4
    span = SPAN
    while not (invariant or alone) and span < reach and _most(reach, span, window) * row_bytes > PARTIAL_BYTES:
        span *= 2
    most = _most(reach, span, window)
    if split is None:
        split = most * row_bytes <= PARTIAL_BYTES and not alone
    splits = most if split else 1
    places = tokens * heads * most if split else 0
    partial = torch.empty(places * v_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(places * 2, dtype=torch.float32, device=q.device)
    shared: dict[str, Any] = {
        "SPAN": span,
        "HEADS": heads,
        "V_DIM": v_dim,
        "BLOCK_V": _padded(v_dim),
        "WINDOW": window,
        "HAS_SINKS": sinks is not None,
        "PDL": pdl,
        # What is multiplied and added is rounded twice wherever it is done: two kernels join spans alike.
        "enable_fp_fusion": False,
        **({"launch_pdl": True} if pdl else {}),
    }
    attend[(count, kv_heads, splits)](
        q, out, partial, stats, arena.view(q.dtype), page_table, q_starts, kv_lens, layer_offset,
        q if sinks is None else sinks, q if bias is None else bias, count, int(split), most, tokens, sequences,
        q.stride(0), page_table.stride(0), 0 if bias is None else bias.stride(0), scale, KV_HEADS=kv_heads, K_DIM=k_dim,
        BLOCK_K=_padded(k_dim), BLOCK_M=rows, PAGE=page_tokens, UNIT=UNIT_BYTES // item_bytes,
        ALIGNMENT=alignment(item_bytes, page_tokens, k_dim, v_dim), SOFTCAP=softcap,
        EXTENT=0 if bias is None else bias.shape[2],
        # The interpreter's bfloat16 arithmetic is wrong.
        COMPUTE=tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype], **tiles, **shared,
    )  # fmt: skip
    if split:
        join[(tokens, heads)](
            partial, stats, out, q_starts, kv_lens, q if sinks is None else sinks, most, sequences,
            JOINED=JOINED, num_warps=4, **shared,
        )  # fmt: skip
    return out


def _most(reach: int, span: int, window: int) -> int:
    """Return of how many spans ``reach`` keys are at most; a window's begin anywhere."""
    return -(-reach // span) + bool(window)


def _tiles(widest: int, item_bytes: int, group: int, few: bool = False) -> tuple[int, dict[str, int]]:
    """Return the rows (query, head) of a tile and how the kernel is launched: by the size of a step only if ``few``."""
    if item_bytes == 4:
        rows, tiles = 16 if few else 32, {"BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    else:
        stages = 2 if widest > 128 else 3
        rows, tiles = 16 if few else 64, {"BLOCK_N": 64, "num_warps": 4, "num_stages": stages}
    return max(rows, int(triton.next_power_of_2(group))), tiles


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
