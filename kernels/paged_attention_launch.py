"""Launches the kernels of paged_attention on a GPU: which of them a step needs, in the tiles that suit it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.state import UNIT_BYTES
from treadle.kernels import paged_attention_triton, paged_prefill_hopper, paged_prefill_triton
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment
from treadle.kernels.paged_attention_tiles import (
    DecodeTiles,
    PrefillTiles,
    Shape,
    decode_tiles,
    for_hopper,
    padded,
    plan_walk,
    prefill_tiles,
    tile_rows,
)

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FEW_TOKENS = 8
"""Up to here every query is taken alone, whoever owns it: a chunk this short leaves a tile of queries almost empty."""
JOIN_ROWS, JOIN_SPLITS, JOIN_WARPS, JOIN_OCCUPANCY = 4, 4, 4, 8
"""How splits of tiles are joined: rows and splits at a time, warps, programs on a multiprocessor."""

JOIN_CONSTANTS = ("HEADS", "KV_HEADS", "V_DIM", "BLOCK_V", "HAS_SINKS", "PDL")


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
            "BLOCK_K": padded(k_dim),
            "BLOCK_V": padded(v_dim),
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
        """Launch decode, and what joins its splits."""
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
            BLOCK_M=tile_rows(16, shape),
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
        """Launch the prefill that is written for Hopper; sequences of fewer than ``least`` queries are left out."""
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
        """Launch prefill, and what joins tiles whose keys were split; ``least`` as above."""
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
