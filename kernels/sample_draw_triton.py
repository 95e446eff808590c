"""The last kernel of a draw: a program for each row finds the thresholds of its cuts, and the token."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from treadle.kernels.sample_values_triton import (
    INF,
    chunk_logits,
    key_of,
    reach,
    row_masses,
    row_top,
    temperature_at,
    uniform,
)


@triton.jit
def _first_beyond(e, kept, before, target, N: tl.constexpr):
    """Return the first kept place at which masses, added up from ``before`` on, exceed the target; else the last."""
    at = tl.arange(0, N)
    sums = before + tl.cumsum(tl.where(kept, e, 0.0), 0)
    first = tl.min(tl.where(kept & (sums > target), at, N), 0)
    last = tl.max(tl.where(kept, at, 0), 0)
    return tl.where(first < N, first, last)


@triton.jit
def _masses_beyond(
    logits, V, forbids, stops, E, t, base, floor, a, b, c, chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return how many tokens of a row, or how much mass, reach the floor and each of three keys."""
    one, two, three = tl.cast(0.0, tl.float64), tl.cast(0.0, tl.float64), tl.cast(0.0, tl.float64)
    for i in range(chunks):
        ids = i * CHUNK + tl.arange(0, CHUNK)
        s = tl.div_rn(chunk_logits(logits, ids, V, forbids, stops, E) - base, t)
        key = key_of(s)
        e = tl.exp(s)
        if COUNT:
            e = tl.full([CHUNK], 1.0, tl.float32)
        e = tl.where((key >= floor.to(tl.int32)) & (s > -INF), e, 0.0).to(tl.float64)
        one += tl.sum(tl.where(key >= a.to(tl.int32), e, 0.0), 0)
        two += tl.sum(tl.where(key >= b.to(tl.int32), e, 0.0), 0)
        three += tl.sum(tl.where(key >= c.to(tl.int32), e, 0.0), 0)
    return one, two, three


@triton.jit
def _reach_in_row(
    logits, V, forbids, stops, E, t, base, floor, needed, high, chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Do as ``reach`` does, from the floor on, over all logits of a row."""
    low = floor
    while high - low > 1:
        size = high - low
        a, b, c = low + tl.maximum(size // 4, 1), low + size // 2, low + size * 3 // 4
        one, two, three = _masses_beyond(
            logits, V, forbids, stops, E, t, base, floor, a, b, c, chunks, COUNT, CHUNK
        )  # fmt: skip
        enough_a, enough_b, enough_c = one >= needed, two >= needed, three >= needed
        high = tl.where(enough_c, high, tl.where(enough_b, c, tl.where(enough_a, b, a)))
        low = tl.where(enough_c, c, tl.where(enough_b, b, tl.where(enough_a, a, low)))
    return low


@triton.jit
def draw_row(
    logits, row_stride, V, best, best_at, mass, bounds, counts, ids_in, values_in, tokens,
    temperature, top_p, min_p, f_stride, top_k, seed, token_index, min_left, i_stride, stops, stops_stride, E, chunks,
    CHUNK: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write the token of one row."""
    r = tl.program_id(0).to(tl.int64)
    t = temperature_at(temperature, r * f_stride)
    tops, top, base = row_top(best, r, chunks, C)
    masses = row_masses(tops, base, mass, r, chunks, t, C)
    each = tl.arange(0, C)
    at = tl.min(tl.where(tops == top, each, C - 1), 0)
    token = tl.load(best_at + r * chunks + tl.minimum(at, chunks - 1))
    drawn = (tl.load(temperature + r * f_stride) > 0) & (top > -INF) & (top < INF)
    if drawn:
        bound = tl.load(bounds + r)
        k, p, part = tl.load(top_k + r * i_stride), tl.load(top_p + r * f_stride), tl.load(min_p + r * f_stride)
        u = uniform(tl.load(seed + r * i_stride), tl.load(token_index + r * i_stride))
        forbids = tl.load(min_left + r * i_stride) > 0
        row, banned = logits + r * row_stride, stops + r * stops_stride
        total = tl.sum(tl.load(counts + r * chunks + each, mask=each < chunks, other=0), 0)
        floor, high = key_of(bound).to(tl.int64), tl.cast(1, tl.int64)
        if bound == INF:
            # nothing is cut: the chunk by the masses of chunks, then inside it
            target = u * tl.max(tl.cumsum(masses, 0), 0)
            chunk = _first_beyond(masses, masses > 0, 0.0, target, C)
            before = tl.sum(tl.where(each < chunk, masses, 0.0), 0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            e = tl.exp(tl.div_rn(chunk_logits(row, ids, V, forbids, banned, E) - base, t)).to(tl.float64)
            token = chunk * CHUNK + _first_beyond(e, e > 0, before, target, CHUNK)
        elif total <= HELD:
            j = tl.arange(0, HELD)
            live = j < total
            s = tl.load(values_in + r * HELD + j, mask=live, other=-INF)
            key = key_of(s)
            if k > 0:
                floor = reach(key, live.to(tl.int32), k, floor, high)
            e = tl.exp(s).to(tl.float64)
            e = tl.where(key >= floor.to(tl.int32), e, 0.0)
            if p < 1:
                # beside top_p alone, tokens below the bound have mass too
                whole = tl.where((k > 0) | (part > 0), tl.sum(e, 0), tl.sum(masses, 0))
                floor = reach(key, e, p.to(tl.float64) * whole, floor, high)
            kept = live & (key >= floor.to(tl.int32))
            target = u * tl.max(tl.cumsum(tl.where(kept, e, 0.0), 0), 0)
            place = _first_beyond(e, kept, 0.0, target, HELD)
            token = tl.load(ids_in + r * HELD + place)
        else:
            if k > 0:
                floor = _reach_in_row(
                    row, V, forbids, banned, E, t, base, floor, k.to(tl.float64), high, chunks, True, CHUNK
                )  # fmt: skip
            if p < 1:
                whole, _, _ = _masses_beyond(
                    row, V, forbids, banned, E, t, base, floor, floor, floor, floor, chunks, False, CHUNK
                )  # fmt: skip
                whole = tl.where((k > 0) | (part > 0), whole, tl.sum(masses, 0))
                floor = _reach_in_row(
                    row, V, forbids, banned, E, t, base, floor, p.to(tl.float64) * whole, high, chunks, False, CHUNK
                )  # fmt: skip
            whole, _, _ = _masses_beyond(
                row, V, forbids, banned, E, t, base, floor, floor, floor, floor, chunks, False, CHUNK
            )  # fmt: skip
            target = u * whole
            before = tl.cast(0.0, tl.float64)
            for i in range(chunks):
                ids = i * CHUNK + tl.arange(0, CHUNK)
                s = tl.div_rn(chunk_logits(row, ids, V, forbids, banned, E) - base, t)
                kept = (key_of(s) >= floor.to(tl.int32)) & (s > -INF)
                e = tl.where(kept, tl.exp(s), 0.0).to(tl.float64)
                after = before + tl.sum(e, 0)
                if (before <= target) & (after > target):
                    token = i * CHUNK + _first_beyond(e, kept, before, target, CHUNK)
                before = after
    tl.store(tokens + r, tl.where((top > -INF) & (top < INF), token, -1).to(tl.int64))
