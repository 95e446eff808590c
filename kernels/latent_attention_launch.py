"""Launches the kernels of paged_latent_attention on a GPU, in tiles that suit the step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.state import UNIT_BYTES
from treadle.graph.workspace import PARTIAL_BYTES
from treadle.kernels import latent_attention_hopper, latent_attention_triton
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
JOIN_PART, JOIN_SPLITS, JOIN_WARPS, JOIN_OCCUPANCY = 128, 64, 8, 8
"""How splits of tiles are joined: channels and splits at a time at least and at most, warps, programs on a
multiprocessor."""
FIXED_ROWS = 16
"""Rows of a tile where a row is to be computed alike in every step."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernel is launched."""

    rows: int
    """(query, head) rows a tile"""
    block: int
    """keys a block"""
    warps: int
    stages: int
    occupancy: int = 1
    """programs that run on a multiprocessor at a time"""
    keys: int = 128
    """keys that a split has at least; 0: no tile is split"""
    waves: int = 1
    """splits for each program that runs at a time: more are dealt out more evenly, and cost more to join"""


def tiles_for(heads: int, tokens: int, sequences: int, width: int, item_bytes: int) -> Tiles:
    """Return the tiles for a step; ``width`` is that of a latent as padded for the matrix units.

    A tile's sums fill the registers: 64 rows of 512 channels take half of those of a multiprocessor.
    """
    if item_bytes == 4:
        return Tiles(rows=16, block=16, warps=8, stages=1)
    together = heads if tokens <= sequences else 64
    rows = min(max(16, int(triton.next_power_of_2(together))), 64)
    if width > 512:
        return Tiles(rows=min(rows, 32), block=32, warps=8, stages=1)
    if rows <= 16 or (rows <= 32 and width <= 256):
        return Tiles(rows=rows, block=32, warps=4, stages=2, occupancy=2)
    # Four warps of wide rows spill registers.
    return Tiles(rows=rows, block=32, warps=8, stages=2)


HOPPER_TILES = Tiles(
    rows=latent_attention_hopper.ROWS, block=latent_attention_hopper.BLOCK, warps=16, stages=2, keys=128, waves=1
)
"""Those of the kernel that is written for Hopper. A program fills a multiprocessor, and more splits are no faster."""


def for_hopper(k_dim: int, v_dim: int, item_bytes: int, page_tokens: int, capability: tuple[int, int]) -> bool:
    """Return whether keys are such as the kernel that is written for Hopper takes."""
    sizes = (k_dim, v_dim, item_bytes) == (latent_attention_hopper.K_DIM, latent_attention_hopper.V_DIM, 2)
    return capability == (9, 0) and sizes and page_tokens in latent_attention_hopper.PAGES


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    # The interpreter runs programs one after the other: few, so that they take turns.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


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
    *,
    pdl: bool = False,
    invariant: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return ``paged_latent_attention``'s result; ``tiles`` replace those that would be chosen.

    ``invariant``: a row's result depends on no other row. Shapes: as the reference.
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    assert select is None or (select.dtype is torch.int32 and select.stride(1) == 1)
    q = rows_contiguous(q)
    tokens, heads, k_dim = q.shape
    sequences, item = kv_lens.shape[0], q.element_size()
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    block_c = padded(v_dim)
    hopper = False
    if tiles is None:
        plain = sequences > 0 and not window and select is None and not invariant
        hopper = plain and for_hopper(k_dim, v_dim, item, page_tokens, _capability(q.device))
        tiles = HOPPER_TILES if hopper else tiles_for(heads, tokens, sequences, block_c, item)
    if invariant:
        tiles = Tiles(rows=FIXED_ROWS, block=16 if item == 4 else 32, warps=tiles.warps, stages=tiles.stages, keys=0)
    choices = 0 if select is None else select.shape[1]
    reach = choices or page_table.shape[1] * page_tokens
    plan = _plan(tiles, tokens, sequences, heads, v_dim, window, reach, select is not None, _processors(q.device))
    partial = torch.empty(plan.splits * tiles.rows * v_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(plan.splits * tiles.rows * 2, dtype=torch.float32, device=q.device)
    extra = q if sinks is None else sinks
    shared: dict[str, Any] = {
        "HEADS": heads,
        "V_DIM": v_dim,
        "BLOCK_C": block_c,
        "BLOCK_M": tiles.rows,
        "WINDOW": window,
        "SELECT": select is not None,
        "HAS_SINKS": sinks is not None,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    counts = (choices, plan.splits, tiles.keys, tokens, sequences)
    tensors = (
        q, out, partial, stats, arena.view(q.dtype), page_table, q_starts, kv_lens, layer_offset, extra
    )  # fmt: skip
    if hopper:
        latent_attention_hopper.launch(
            *tensors,
            programs=plan.programs,
            splits=plan.splits,
            least_keys=tiles.keys,
            scale=scale,
            page_tokens=page_tokens,
            has_sinks=sinks is not None,
        )
    else:
        latent_attention_triton.attend[(plan.programs,)](
            *tensors,
            q_starts if select is None else select,
            *counts,
            q.stride(0),
            page_table.stride(0),
            0 if select is None else select.stride(0),
            scale,
            SPLIT=plan.splits > 0,
            K_DIM=k_dim,
            BLOCK_R=padded(k_dim - v_dim),
            BLOCK_N=tiles.block,
            PAGE=page_tokens,
            UNIT=UNIT_BYTES // item,
            ALIGNMENT=alignment(item, page_tokens, k_dim),
            FIXED=invariant,
            # The interpreter's bfloat16 arithmetic is wrong.
            COMPUTE=tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype],
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **shared,
        )
    if plan.splits:
        latent_attention_triton.join[(plan.joins,)](
            partial,
            stats,
            out,
            q_starts,
            kv_lens,
            extra,
            *counts,
            ROWS=plan.join_rows,
            COLUMNS=plan.join_columns,
            SPLITS=plan.join_splits,
            num_warps=JOIN_WARPS,
            **shared,
        )
    return out


@dataclass(frozen=True, kw_only=True)
class _Plan:
    programs: int
    splits: int
    """the most splits of tiles that are split; 0: none is"""
    joins: int
    """programs that join them"""
    join_rows: int
    join_columns: int
    join_splits: int
    """what each of them takes at a time"""


def _plan(
    tiles: Tiles, tokens: int, sequences: int, heads: int, v_dim: int, window: int, reach: int, select: bool,
    processors: int,
) -> _Plan:  # fmt: skip
    """Return how the work of a step is dealt out, from shapes alone: a tile sweeps over at most ``reach`` keys."""
    if window:
        reach = min(reach, window + tiles.rows // heads + 1)
    if select:
        most = tokens * triton.cdiv(heads, tiles.rows)
    else:
        most = tokens * heads // tiles.rows + sequences + 1
    slots = processors * tiles.occupancy
    splits = 0
    if tiles.keys and reach >= 2 * tiles.keys:
        room = PARTIAL_BYTES // (tiles.rows * (v_dim + 2) * 4)
        splits = min(slots * tiles.waves, room, most * (reach // tiles.keys))
    programs = min(slots, most * max(reach // tiles.keys, 1) if splits else most)
    # Few rows have many splits each: more of these at a time, of fewer channels, by as many programs.
    joins, width = processors * JOIN_OCCUPANCY, padded(v_dim)
    parts = most * tiles.rows * triton.cdiv(width, JOIN_PART)
    together = min(int(triton.next_power_of_2(triton.cdiv(parts, joins))), 16)
    columns = min(width, JOIN_PART * together)
    rows = min(max(together * JOIN_PART // width, 1), tiles.rows)
    return _Plan(
        programs=programs, splits=splits, joins=min(joins, splits * tiles.rows), join_rows=rows,
        join_columns=columns, join_splits=max(JOIN_SPLITS // together, 4),
    )  # fmt: skip


def padded(dim: int) -> int:
    """Return channels as the matrix units take them: a power of two."""
    return max(16, int(triton.next_power_of_2(dim)))
