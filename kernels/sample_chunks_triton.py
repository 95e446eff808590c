"""The first kernels of a draw: over chunks of all rows, the largest logits, a bound for each row, what reaches it."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from treadle.kernels.sample_values_triton import (
    INF,
    LOWEST,
    LOWEST_KEY,
    chunk_logits,
    key_of,
    reach,
    row_masses,
    row_top,
    temperature_at,
)


@triton.jit
def chunk_peaks(
    logits, row_stride, V, best, best_at, mass, peaks, temperature, f_stride, min_left, i_stride, stops, stops_stride,
    E, DRAW: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of a chunk, and where a token is drawn its mass and the largest of every segment."""
    c, chunks = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1).to(tl.int64)
    ids = c * CHUNK + tl.arange(0, CHUNK)
    forbids = tl.load(min_left + r * i_stride) > 0 if DRAW else False
    v = chunk_logits(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
    # NaN goes along as infinity: the row is refused in the end
    v = tl.where(v != v, INF, v)
    top, at = tl.max(v, 0, return_indices=True)
    tl.store(best + r * chunks + c, top)
    tl.store(best_at + r * chunks + c, c * CHUNK + at)
    if DRAW:
        t = temperature_at(temperature, r * f_stride)
        some = (top > -INF) & (top < INF)
        e = tl.exp(tl.div_rn(v - tl.where(some, top, 0.0), t))
        tl.store(mass + r * chunks + c, tl.where(some, tl.sum(e.to(tl.float64), 0), 0.0))
        each: tl.constexpr = CHUNK // SEGMENT
        peak = tl.max(tl.reshape(v, (each, SEGMENT)), 1)
        tl.store(peaks + (r * chunks + c) * each + tl.arange(0, each), peak)


@triton.jit
def take_best(best, best_at, tokens, chunks, C: tl.constexpr):
    """Write the first largest of a row, -1 where it is not finite."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    top, at = tl.max(tl.load(best + r * chunks + c, mask=c < chunks, other=-INF), 0, return_indices=True)
    token = tl.load(best_at + r * chunks + at)
    tl.store(tokens + r, tl.where((top > -INF) & (top < INF), token, -1).to(tl.int64))


@triton.jit
def row_bounds(
    best, mass, peaks, bounds, temperature, top_p, min_p, f_stride, top_k, i_stride, V, chunks, segments,
    C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Write a value that everything a row keeps reaches, infinity where nothing is cut or drawn."""
    r = tl.program_id(0).to(tl.int64)
    t = temperature_at(temperature, r * f_stride)
    k, p, part = tl.load(top_k + r * i_stride), tl.load(top_p + r * f_stride), tl.load(min_p + r * f_stride)
    tops, top, base = row_top(best, r, chunks, C)
    masses = row_masses(tops, base, mass, r, chunks, t, C)
    bound = tl.cast(LOWEST, tl.float32)
    if part > 0:
        bound = tl.maximum(bound, tl.log(part))
    if (k > 0) & (k <= segments):
        j = tl.arange(0, S)
        keys = key_of(tl.div_rn(tl.load(peaks + r * segments + j, mask=j < segments, other=-INF) - base, t))
        lowest, high = tl.cast(LOWEST_KEY, tl.int64), tl.cast(1, tl.int64)
        key = reach(keys, tl.full([S], 1, tl.int32), k, lowest, high).to(tl.int32)
        value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        bound = tl.maximum(bound, value)
    if (k <= 0) & (part <= 0) & (p < 1):
        # a little lower, for the sake of rounding
        spare = tl.maximum((1 - p) * tl.sum(masses, 0).to(tl.float32) / V, 1e-37)
        bound = tl.maximum(bound, tl.log(spare) - 0.001)
    cut = (k > 0) | (p < 1) | (part > 0)
    drawn = (tl.load(temperature + r * f_stride) > 0) & (top > -INF) & (top < INF)
    tl.store(bounds + r, tl.where(cut & drawn, bound, INF))


@triton.jit
def gather(
    logits, row_stride, V, best, bounds, counts, ids_out, values_out, temperature, f_stride, min_left, i_stride, stops,
    stops_stride, E, COUNT: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Count what reaches the bound, or write it down behind what earlier chunks write."""
    c, chunks = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1).to(tl.int64)
    t = temperature_at(temperature, r * f_stride)
    bound = tl.load(bounds + r)
    _, _, base = row_top(best, r, chunks, C)
    ids = c * CHUNK + tl.arange(0, CHUNK)
    if COUNT:
        number = 0
        if (bound < INF) & (tl.div_rn(tl.load(best + r * chunks + c) - base, t) >= bound):
            forbids = tl.load(min_left + r * i_stride) > 0
            v = chunk_logits(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
            number = tl.sum((tl.div_rn(v - base, t) >= bound).to(tl.int32), 0)
        tl.store(counts + r * chunks + c, number)
    else:
        each = tl.arange(0, C)
        numbers = tl.load(counts + r * chunks + each, mask=each < chunks, other=0)
        if (tl.sum(numbers, 0) <= HELD) & (tl.load(counts + r * chunks + c) > 0):
            forbids = tl.load(min_left + r * i_stride) > 0
            v = chunk_logits(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
            s = tl.div_rn(v - base, t)
            kept = s >= bound
            at = tl.sum(tl.where(each < c, numbers, 0), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(ids_out + r * HELD + at, ids, mask=kept)
            tl.store(values_out + r * HELD + at, s, mask=kept)
