"""How a step of attention over pages is cut on a GPU: tiles, splits of histories, and which prefill kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from treadle.graph.workspace import PARTIAL_BYTES
from treadle.kernels import paged_prefill_hopper

MOST_SPLITS = 32
WALKED_TOKENS = 1024
"""Up to here a step may be part of a captured graph, padded to many sequences: programs take turns at the tiles there
are, since most of those there might be turn out empty. Beyond, the device deals tiles out as programs end, which
balances them better."""
FULL_WAVES = 3
"""So many tiles for each program that runs at a time keep the device busy to the end without splitting any."""


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
        return max(padded(self.k_dim), padded(self.v_dim))


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
        return PrefillTiles(rows=tile_rows(16 if rows <= 16 else 32, shape), block=16, warps=8, stages=2)
    if rows <= 16:
        return PrefillTiles(rows=tile_rows(16, shape), block=32, warps=2, stages=3, occupancy=4)
    if rows * shape.kv_heads < 128 * shape.processors:
        if shape.widest > 128:
            return PrefillTiles(rows=tile_rows(64, shape), block=64, warps=4, stages=2)
        return PrefillTiles(rows=tile_rows(64, shape), block=64, warps=4, stages=3, occupancy=2)
    if shape.widest > 128:
        return PrefillTiles(rows=tile_rows(128, shape), block=64, warps=8, stages=2)
    return PrefillTiles(rows=tile_rows(128, shape), block=64, warps=8, stages=3)


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


def tile_rows(rows: int, shape: Shape) -> int:
    """Return ``rows``, or more where a group of query heads needs more."""
    return max(rows, int(triton.next_power_of_2(shape.group)))


def padded(dim: int) -> int:
    """Return the channels of a head as the matrix units take them: a power of two."""
    return max(16, int(triton.next_power_of_2(dim)))
