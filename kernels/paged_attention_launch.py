"""Launches the Triton kernels of paged_attention: which of them a step needs, in which tiles, split how often."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.footprint import PARTIAL_BYTES
from treadle.graph.state import UNIT_BYTES
from treadle.kernels import paged_attention_triton, paged_prefill_hopper, paged_prefill_triton
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FEW_TOKENS = 8
"""Up to here every query is taken alone, whoever owns it: a chunk this short leaves a tile of queries almost empty."""
MOST_SPLITS = 32
WALKED_TOKENS = 1024
"""Up to here a step may be part of a captured graph, padded to many sequences: programs take turns at the tiles there
are, since most of those there might be turn out empty. Beyond, the device deals tiles out as programs end, which
balances them better."""
FULL_WAVES = 3
"""So many tiles for each program that runs at a time keep the device busy to the end without splitting any."""
JOIN_ROWS, JOIN_SPLITS, JOIN_WARPS, JOIN_OCCUPANCY = 4, 4, 4, 8
"""How splits of tiles are joined: rows and splits at a time, warps, programs on a multiprocessor."""

JOIN_CONSTANTS = ("HEADS", "KV_HEADS", "V_DIM", "BLOCK_V", "HAS_SINKS", "PDL")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the choice of tiles depends on."""

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    item_bytes: int
    processors: int
    """multiprocessors of the device"""

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def widest(self) -> int:
        """Channels of a head as padded for the matrix units."""
        return max(_padded(self.k_dim), _padded(self.v_dim))


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """How the decode kernel is launched."""

    block: int
    """keys a block"""
    warps: int
    stages: int
    splits: int
    prefetch: bool
    """read the first block before waiting for the kernel before"""


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """How the prefill kernel is launched."""

    rows: int
    """(query, head) rows a tile"""
    block: int
    """keys a block"""
    warps: int
    stages: int
    occupancy: int = 1
    """programs that run on a multiprocessor at a time"""
    keys: int = 512
    """keys that a split has at least; 0: no tile is split"""
    waves: int = 1
    """splits for each program that runs at a time: more are dealt out more evenly, and cost more to join"""
    registers: int | None = None
    """the most that a thread may have"""


def decode_tiles(shape: Shape) -> DecodeTiles:
    """Return the tiles of the decode kernel; splits fill the device without knowing any length."""
    programs = min(shape.tokens, shape.sequences) * shape.kv_heads
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * programs <= 2 * shape.processors:
        splits *= 2
    if shape.item_bytes * shape.widest > 256:
        # Larger blocks of wide rows spill registers.
        block = 32 if shape.item_bytes * shape.widest <= 512 else 16
        return DecodeTiles(block=block, warps=4, stages=2, splits=splits, prefetch=False)
    # Measured on one H200, bfloat16, heads of 128: few sequences want short blocks early, many want long ones.
    if programs <= 16:
        return DecodeTiles(block=32, warps=4, stages=2, splits=splits, prefetch=True)
    if programs >= 3 * shape.processors:
        return DecodeTiles(block=64, warps=4, stages=2, splits=splits, prefetch=False)
    return DecodeTiles(block=32, warps=2, stages=3, splits=splits, prefetch=False)


def prefill_tiles(shape: Shape) -> PrefillTiles:
    """Return the tiles of the prefill kernel: small ones where large ones would leave processors idle."""
    rows = shape.tokens * shape.group
    if shape.item_bytes == 4:
        return PrefillTiles(rows=_rows(16 if rows <= 16 else 32, shape), block=16, warps=8, stages=2)
    if rows <= 16:
        return PrefillTiles(rows=_rows(16, shape), block=32, warps=2, stages=3, occupancy=4)
    if rows * shape.kv_heads < 128 * shape.processors:
        if shape.widest > 128:
            return PrefillTiles(rows=_rows(64, shape), block=64, warps=4, stages=2)
        return PrefillTiles(rows=_rows(64, shape), block=64, warps=4, stages=3, occupancy=2)
    if shape.widest > 128:
        return PrefillTiles(rows=_rows(128, shape), block=64, warps=8, stages=2)
    return PrefillTiles(rows=_rows(128, shape), block=64, warps=8, stages=3)


def for_hopper(shape: Shape, page_tokens: int, capability: tuple[int, int]) -> bool:
    """Return whether a step's prefill is for the kernel that is written for Hopper: it has work for all processors."""
    suited = shape.item_bytes == 2 and shape.k_dim == shape.v_dim in paged_prefill_hopper.DIMS
    fits = page_tokens in paged_prefill_hopper.PAGES and shape.group <= paged_prefill_hopper.ROWS
    tiles = shape.tokens * shape.group // paged_prefill_hopper.ROWS
    # Steps that are padded to many sequences are mostly tiles that turn out empty.
    busy = tiles * shape.kv_heads >= 0.75 * shape.processors and shape.sequences <= 4 * tiles
    return capability == (9, 0) and suited and fits and busy


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How prefill's programs share the work of a step."""

    programs: int
    walk: bool
    """programs take turns at the tiles there are; else each has one of those there might be"""
    splits: int
    """the most splits of tiles that are split; 0: none is"""
    tiles: int
    """how many there might be, of a kv head"""


def plan_walk(shape: Shape, tiles: PrefillTiles, reach: int) -> Walk:
    """Return how a step's tiles are dealt out, where a tile sweeps over at most ``reach`` keys."""
    tokens = tiles.rows // shape.group
    most = shape.tokens // tokens + shape.sequences + 1
    slots = shape.processors * tiles.occupancy
    splits = 0
    full = shape.tokens * shape.kv_heads >= FULL_WAVES * slots * tokens
    if tiles.keys and reach >= 2 * tiles.keys and not full:
        room = PARTIAL_BYTES // (tiles.rows * (shape.v_dim + 2) * 4)
        splits = min(slots * tiles.waves, room, most * shape.kv_heads * (reach // tiles.keys))
    programs = most * shape.kv_heads
    if splits:
        return Walk(programs=min(slots, programs * (reach // tiles.keys)), walk=True, splits=splits, tiles=most)
    walk = shape.tokens <= WALKED_TOKENS and programs > slots
    return Walk(programs=slots if walk else programs, walk=walk, splits=0, tiles=most)


def _rows(rows: int, shape: Shape) -> int:
    """Return ``rows``, or more where a group of query heads needs more."""
    return max(rows, int(triton.next_power_of_2(shape.group)))


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


@functools.cache
def _processors(device: torch.device) -> int:
    # The interpreter runs programs one after the other: few, so that they take turns.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


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
    decode: DecodeTiles | None = None,
    prefill: PrefillTiles | None = None,
) -> Tensor:
    """Return ``paged_attention``'s result; ``decode`` and ``prefill`` replace the tiles that would be chosen.

    A step with as many tokens as sequences is taken for a decode step; where it is not one, it is slower, but right.
    Shapes: as the reference.
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    q = rows_contiguous(q)
    tokens, heads, k_dim = q.shape
    sequences = kv_lens.shape[0]
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    shape = Shape(
        tokens=tokens,
        sequences=sequences,
        heads=heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        item_bytes=q.element_size(),
        processors=_processors(q.device),
    )
    launch = _Launch(
        inputs=(
            arena.view(q.dtype),
            page_table,
            q_starts,
            kv_lens,
            layer_offset,
            q if sinks is None else sinks,
            q if slopes is None else slopes,
        ),
        scale=scale,
        shape=shape,
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "K_DIM": k_dim,
            "V_DIM": v_dim,
            "BLOCK_K": _padded(k_dim),
            "BLOCK_V": _padded(v_dim),
            "PAGE": page_tokens,
            "UNIT": UNIT_BYTES // shape.item_bytes,
            "ALIGNMENT": alignment(shape.item_bytes, page_tokens, k_dim, v_dim),
            "WINDOW": window,
            "CHUNK": chunk,
            "SOFTCAP": softcap,
            "ALIBI": slopes is not None,
            "HAS_SINKS": sinks is not None,
            # The interpreter's bfloat16 arithmetic is wrong.
            "COMPUTE": tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype],
            "PDL": pdl,
        },
        options={"launch_pdl": True} if pdl else {},
    )
    by_row = tokens == sequences or tokens <= FEW_TOKENS
    if by_row or sequences > 1:
        launch.decode(q, out, decode or decode_tiles(shape), by_row)
    least = 2 if sequences > 1 else 0
    plain = not chunk and slopes is None and prefill is None
    if not by_row and plain and for_hopper(shape, page_tokens, _capability(q.device)):
        launch.hopper(q, out, least)
    elif not by_row:
        launch.prefill(q, out, prefill or prefill_tiles(shape), least)
    return out


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What all launches of a step share."""

    inputs: tuple[Tensor, ...]
    scale: float
    shape: Shape
    constants: dict[str, Any]
    options: dict[str, Any]

    def decode(self, q: Tensor, out: Tensor, tiles: DecodeTiles, by_row: bool) -> None:
        shape, splits = self.shape, tiles.splits
        slots = shape.tokens if by_row else shape.sequences
        count = slots * shape.heads * splits if splits > 1 else 0
        partial = torch.empty(count * shape.v_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
        table, starts, sinks = self.inputs[1], self.inputs[2], self.inputs[5]
        paged_attention_triton.decode[(slots, shape.kv_heads, splits)](
            q,
            out,
            partial,
            stats,
            *self.inputs,
            shape.sequences,
            q.stride(0),
            table.stride(0),
            self.scale,
            BY_ROW=by_row,
            SPLITS=splits,
            PREFETCH=tiles.prefetch,
            BLOCK_M=_rows(16, shape),
            BLOCK_N=tiles.block,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **self.constants,
            **self.options,
        )
        if splits > 1:
            paged_attention_triton.combine[(slots, shape.heads)](
                partial,
                stats,
                out,
                starts,
                sinks,
                BY_ROW=by_row,
                HEADS=shape.heads,
                V_DIM=shape.v_dim,
                BLOCK_V=self.constants["BLOCK_V"],
                SPLITS=splits,
                BLOCK_S=triton.next_power_of_2(splits),
                HAS_SINKS=self.constants["HAS_SINKS"],
                PDL=self.constants["PDL"],
                num_warps=4,
                **self.options,
            )

    def hopper(self, q: Tensor, out: Tensor, least: int) -> None:
        shape = self.shape
        paged_prefill_hopper.launch(
            q,
            out,
            *self.inputs[:6],
            tiles=shape.tokens // (paged_prefill_hopper.ROWS // shape.group) + shape.sequences + 1,
            least=least,
            scale=self.scale,
            page_tokens=self.constants["PAGE"],
            kv_heads=shape.kv_heads,
            window=self.constants["WINDOW"],
            softcap=self.constants["SOFTCAP"],
            has_sinks=self.constants["HAS_SINKS"],
        )

    def prefill(self, q: Tensor, out: Tensor, tiles: PrefillTiles, least: int) -> None:
        shape, table = self.shape, self.inputs[1]
        _, _, starts, lengths, _, sinks, _ = self.inputs
        seen = min((self.constants[name] for name in ("WINDOW", "CHUNK") if self.constants[name]), default=0)
        reach = table.shape[1] * self.constants["PAGE"]
        if seen:
            reach = min(reach, seen + tiles.rows // shape.group - 1)
        walk = plan_walk(shape, tiles, reach)
        count = walk.splits * tiles.rows
        partial = torch.empty(count * shape.v_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
        options = dict(self.options)
        if tiles.registers is not None:
            options["maxnreg"] = tiles.registers
        paged_prefill_triton.prefill[(walk.programs,)](
            q,
            out,
            partial,
            stats,
            *self.inputs,
            walk.tiles,
            walk.splits,
            tiles.keys,
            shape.tokens,
            shape.sequences,
            q.stride(0),
            table.stride(0),
            self.scale,
            WALK=walk.walk,
            SPLIT=walk.splits > 0,
            LEAST=least,
            REACH=seen,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.block,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **self.constants,
            **options,
        )
        if walk.splits:
            programs = min(shape.processors * JOIN_OCCUPANCY, count // JOIN_ROWS)
            paged_prefill_triton.join[(programs,)](
                partial,
                stats,
                out,
                starts,
                lengths,
                sinks,
                walk.splits,
                tiles.keys,
                shape.tokens,
                shape.sequences,
                LEAST=least,
                REACH=seen,
                BLOCK_M=tiles.rows,
                ROWS=JOIN_ROWS,
                SPLITS=JOIN_SPLITS,
                num_warps=JOIN_WARPS,
                **{name: self.constants[name] for name in JOIN_CONSTANTS},
                **self.options,
            )
