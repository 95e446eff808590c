"""Triton kernels that draw tokens, without sorting: nothing is known to the host, every launch is the same.

The order of steps, and what a row keeps, are ``runtime.sampler``'s: min_tokens, temperature, min_p, top_k, top_p, then
inverse transform in the order of the vocabulary. Masses are added in float64. Values are what a logit lies below the
row's largest, divided by the temperature: the largest is 0 at every temperature.

    chunks   each CHUNK of a row: its largest logit, its mass, and the largest logit of every SEGMENT
    bounds   each row: a value that everything the row keeps reaches. min_p says it; of top_k, the k-th largest segment
             has one; of top_p: what lies below (1 - p) / V of the mass cannot hold 1 - p of it
    count    tokens of each chunk that reach the bound
    gather   those tokens in order, if there are at most HELD
    draw     thresholds by bisection over the bits of the values, held in registers; then the draw

A row without cuts is drawn by the masses of its chunks. A row so flat that more than HELD tokens reach its bound
bisects over the logits themselves, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from treadle.kernels.adjust_logits_triton import adjust_logits as adjust_logits
from treadle.kernels.adjust_logits_triton import note_tokens as note_tokens
from treadle.kernels.sample import Rows
from treadle.kernels.sample_chunks_triton import chunk_peaks, gather, row_bounds, take_best
from treadle.kernels.sample_draw_triton import draw_row

CHUNK = 4096
SEGMENT = 128
HELD = 4096


def greedy(logits: Tensor) -> Tensor:
    """Return the first largest token of each row of ``logits`` [R, V], -1 where the largest is not finite: [R] int64.

    A row with NaN has no largest.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(tokens) == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    best, best_at = _find_best(logits, {"DRAW": False})
    chunks = best.shape[1]
    take_best[(len(tokens),)](best, best_at, tokens, chunks, C=triton.next_power_of_2(chunks), num_warps=1)
    return tokens


def draw(logits: Tensor, rows: Rows) -> Tensor:
    """Return a token for each row of ``logits`` [R, V], -1 where they are not finite: [R] int64.

    Rows at temperature 0 get their first largest. Parameters: as ``Rows`` describes them.
    """
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperature, top_p, min_p = _alike([rows.temperature, rows.top_p, rows.min_p])
    top_k, seed, token_index, min_left = _alike([rows.top_k, rows.seed, rows.token_index, rows.min_left])
    stops = rows.stops if rows.stops.stride(1) == 1 else rows.stops.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    segments = chunks * (CHUNK // SEGMENT)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    mass, peaks = scratch(count, chunks, dtype=torch.float64), scratch(count, segments)
    bounds, counts = scratch(count), scratch(count, chunks, dtype=torch.int32)
    ids, values = scratch(count, HELD, dtype=torch.int32), scratch(count, HELD)
    padded = triton.next_power_of_2(chunks)
    heat: dict[str, Any] = {"temperature": temperature, "f_stride": temperature.stride(0)}
    forbidden: dict[str, Any] = {
        "min_left": min_left, "i_stride": min_left.stride(0), "stops": stops, "stops_stride": stops.stride(0),
        "E": stops.shape[1],
    }  # fmt: skip
    best, best_at = _find_best(logits, {**heat, **forbidden, "mass": mass, "peaks": peaks, "DRAW": True})
    row_bounds[(count,)](
        best, mass, peaks, bounds, **heat, top_p=top_p, min_p=min_p, top_k=top_k, i_stride=top_k.stride(0), V=vocab,
        chunks=chunks, segments=segments, C=padded, S=triton.next_power_of_2(segments), num_warps=4,
    )  # fmt: skip
    for counting in (True, False):
        gather[(chunks, count)](
            logits, logits.stride(0), vocab, best, bounds, counts, ids, values, **heat, **forbidden, COUNT=counting,
            CHUNK=CHUNK, C=padded, HELD=HELD, num_warps=4 if counting else 8,
        )  # fmt: skip
    draw_row[(count,)](
        logits, logits.stride(0), vocab, best, best_at, mass, bounds, counts, ids, values, tokens, **heat,
        **forbidden, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed, token_index=token_index, chunks=chunks,
        CHUNK=CHUNK, C=padded, HELD=HELD, num_warps=8,
    )  # fmt: skip
    return tokens


def _find_best(logits: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the largest logit of every chunk and its token, [R, chunks]."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    best_at = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    unused = dict.fromkeys(("mass", "peaks", "temperature", "min_left", "stops"), best)
    unused |= dict.fromkeys(("f_stride", "i_stride", "stops_stride", "E"), 0)  # type: ignore[arg-type]
    chunk_peaks[(chunks, count)](
        logits, logits.stride(0), vocab, best, best_at, **{**unused, **arguments}, CHUNK=CHUNK, SEGMENT=SEGMENT,
        num_warps=4,
    )  # fmt: skip
    return best, best_at


def _alike(columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the columns, [R] each, with one stride: they usually are views of one table."""
    if len({column.stride(0) for column in columns}) == 1:
        return columns
    return [column.contiguous() for column in columns]
