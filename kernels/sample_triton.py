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

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.sample import Rows

CHUNK = 4096
SEGMENT = 128
HELD = 4096

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOWEST_KEY = tl.constexpr(-2139095041)
"""``_key`` of -inf"""
_INF = tl.constexpr(float("inf"))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _key(value):
    """Return int32 that are ordered as the fp32 values are; equal zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mix(x):
    x = x + _GOLDEN
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, index):
    """Return ``runtime.sampler.uniforms`` of one pair."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + index.to(tl.uint64) * _GOLDEN)
    return (mixed >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _temperature(temperature, at):
    t = tl.load(temperature + at)
    return tl.where(t > 0, t, 1.0)


@triton.jit
def _chunk(logits, ids, V, forbids, stops, E):
    """Return the logits ``ids`` of a row as fp32; -inf outside and where stop tokens are forbidden."""
    v = tl.load(logits + ids, mask=ids < V, other=-_INF).to(tl.float32)
    if forbids:
        for i in range(E):
            v = tl.where(ids == tl.load(stops + i).to(tl.int32), -_INF, v)
    return v


@triton.jit
def _chunks(
    logits, row_stride, V, best, best_at, mass, peaks, temperature, f_stride, min_left, i_stride, stops, stops_stride,
    E, DRAW: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    c, chunks = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1).to(tl.int64)
    ids = c * CHUNK + tl.arange(0, CHUNK)
    forbids = tl.load(min_left + r * i_stride) > 0 if DRAW else False
    v = _chunk(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
    # NaN goes along as infinity: the row is refused in the end
    v = tl.where(v != v, _INF, v)
    top, at = tl.max(v, 0, return_indices=True)
    tl.store(best + r * chunks + c, top)
    tl.store(best_at + r * chunks + c, c * CHUNK + at)
    if DRAW:
        t = _temperature(temperature, r * f_stride)
        some = (top > -_INF) & (top < _INF)
        e = tl.exp(tl.div_rn(v - tl.where(some, top, 0.0), t))
        tl.store(mass + r * chunks + c, tl.where(some, tl.sum(e.to(tl.float64), 0), 0.0))
        each: tl.constexpr = CHUNK // SEGMENT
        peak = tl.max(tl.reshape(v, (each, SEGMENT)), 1)
        tl.store(peaks + (r * chunks + c) * each + tl.arange(0, each), peak)


@triton.jit
def _take_best(best, best_at, tokens, chunks, C: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    top, at = tl.max(tl.load(best + r * chunks + c, mask=c < chunks, other=-_INF), 0, return_indices=True)
    token = tl.load(best_at + r * chunks + at)
    tl.store(tokens + r, tl.where((top > -_INF) & (top < _INF), token, -1).to(tl.int64))


@triton.jit
def _reach(keys, mass, needed, low, high):
    """Return the largest key in [low, high) that keys of ``needed`` mass reach; low if there is none. All int64."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), mass, tl.zeros_like(mass)), 0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _row_top(best, r, chunks, C: tl.constexpr):
    """Return the chunks' maxima, the row's maximum, and the same or 0 where it is not finite."""
    c = tl.arange(0, C)
    tops = tl.load(best + r * chunks + c, mask=c < chunks, other=-_INF)
    top = tl.max(tops, 0)
    return tops, top, tl.where((top > -_INF) & (top < _INF), top, 0.0)


@triton.jit
def _row_masses(tops, base, mass, r, chunks, t, C: tl.constexpr):
    """Return the chunks' masses relative to the row's maximum ``base``, after temperature."""
    c = tl.arange(0, C)
    masses = tl.load(mass + r * chunks + c, mask=c < chunks, other=0.0)
    # at 0 where the row's maximum is not finite, and its masses are not used
    below = tl.minimum(tl.div_rn(tops - base, t), 0.0)
    return masses * tl.exp(below).to(tl.float64)


@triton.jit
def _bounds(
    best, mass, peaks, bounds, temperature, top_p, min_p, f_stride, top_k, i_stride, V, chunks, segments,
    C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    t = _temperature(temperature, r * f_stride)
    k, p, part = tl.load(top_k + r * i_stride), tl.load(top_p + r * f_stride), tl.load(min_p + r * f_stride)
    tops, top, base = _row_top(best, r, chunks, C)
    masses = _row_masses(tops, base, mass, r, chunks, t, C)
    bound = tl.cast(_LOWEST, tl.float32)
    if part > 0:
        bound = tl.maximum(bound, tl.log(part))
    if (k > 0) & (k <= segments):
        j = tl.arange(0, S)
        keys = _key(tl.div_rn(tl.load(peaks + r * segments + j, mask=j < segments, other=-_INF) - base, t))
        lowest, high = tl.cast(_LOWEST_KEY, tl.int64), tl.cast(1, tl.int64)
        key = _reach(keys, tl.full([S], 1, tl.int32), k, lowest, high).to(tl.int32)
        value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        bound = tl.maximum(bound, value)
    if (k <= 0) & (part <= 0) & (p < 1):
        # a little lower, for the sake of rounding
        spare = tl.maximum((1 - p) * tl.sum(masses, 0).to(tl.float32) / V, 1e-37)
        bound = tl.maximum(bound, tl.log(spare) - 0.001)
    cut = (k > 0) | (p < 1) | (part > 0)
    drawn = (tl.load(temperature + r * f_stride) > 0) & (top > -_INF) & (top < _INF)
    tl.store(bounds + r, tl.where(cut & drawn, bound, _INF))


@triton.jit
def _gather(
    logits, row_stride, V, best, bounds, counts, ids_out, values_out, temperature, f_stride, min_left, i_stride, stops,
    stops_stride, E, COUNT: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Count what reaches the bound, or write it down behind what earlier chunks write."""
    c, chunks = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1).to(tl.int64)
    t = _temperature(temperature, r * f_stride)
    bound = tl.load(bounds + r)
    _, _, base = _row_top(best, r, chunks, C)
    ids = c * CHUNK + tl.arange(0, CHUNK)
    if COUNT:
        number = 0
        if (bound < _INF) & (tl.div_rn(tl.load(best + r * chunks + c) - base, t) >= bound):
            forbids = tl.load(min_left + r * i_stride) > 0
            v = _chunk(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
            number = tl.sum((tl.div_rn(v - base, t) >= bound).to(tl.int32), 0)
        tl.store(counts + r * chunks + c, number)
    else:
        each = tl.arange(0, C)
        numbers = tl.load(counts + r * chunks + each, mask=each < chunks, other=0)
        if (tl.sum(numbers, 0) <= HELD) & (tl.load(counts + r * chunks + c) > 0):
            forbids = tl.load(min_left + r * i_stride) > 0
            v = _chunk(logits + r * row_stride, ids, V, forbids, stops + r * stops_stride, E)
            s = tl.div_rn(v - base, t)
            kept = s >= bound
            at = tl.sum(tl.where(each < c, numbers, 0), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(ids_out + r * HELD + at, ids, mask=kept)
            tl.store(values_out + r * HELD + at, s, mask=kept)


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
        s = tl.div_rn(_chunk(logits, ids, V, forbids, stops, E) - base, t)
        key = _key(s)
        e = tl.exp(s)
        if COUNT:
            e = tl.full([CHUNK], 1.0, tl.float32)
        e = tl.where((key >= floor.to(tl.int32)) & (s > -_INF), e, 0.0).to(tl.float64)
        one += tl.sum(tl.where(key >= a.to(tl.int32), e, 0.0), 0)
        two += tl.sum(tl.where(key >= b.to(tl.int32), e, 0.0), 0)
        three += tl.sum(tl.where(key >= c.to(tl.int32), e, 0.0), 0)
    return one, two, three


@triton.jit
def _reach_in_row(
    logits, V, forbids, stops, E, t, base, floor, needed, high, chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Do as ``_reach`` does, from the floor on, over all logits of a row."""
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
def _draw(
    logits, row_stride, V, best, best_at, mass, bounds, counts, ids_in, values_in, tokens,
    temperature, top_p, min_p, f_stride, top_k, seed, token_index, min_left, i_stride, stops, stops_stride, E, chunks,
    CHUNK: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    t = _temperature(temperature, r * f_stride)
    tops, top, base = _row_top(best, r, chunks, C)
    masses = _row_masses(tops, base, mass, r, chunks, t, C)
    each = tl.arange(0, C)
    at = tl.min(tl.where(tops == top, each, C - 1), 0)
    token = tl.load(best_at + r * chunks + tl.minimum(at, chunks - 1))
    drawn = (tl.load(temperature + r * f_stride) > 0) & (top > -_INF) & (top < _INF)
    if drawn:
        bound = tl.load(bounds + r)
        k, p, part = tl.load(top_k + r * i_stride), tl.load(top_p + r * f_stride), tl.load(min_p + r * f_stride)
        u = _uniform(tl.load(seed + r * i_stride), tl.load(token_index + r * i_stride))
        forbids = tl.load(min_left + r * i_stride) > 0
        row, banned = logits + r * row_stride, stops + r * stops_stride
        total = tl.sum(tl.load(counts + r * chunks + each, mask=each < chunks, other=0), 0)
        floor, high = _key(bound).to(tl.int64), tl.cast(1, tl.int64)
        if bound == _INF:
            # nothing is cut: the chunk by the masses of chunks, then inside it
            target = u * tl.max(tl.cumsum(masses, 0), 0)
            chunk = _first_beyond(masses, masses > 0, 0.0, target, C)
            before = tl.sum(tl.where(each < chunk, masses, 0.0), 0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            e = tl.exp(tl.div_rn(_chunk(row, ids, V, forbids, banned, E) - base, t)).to(tl.float64)
            token = chunk * CHUNK + _first_beyond(e, e > 0, before, target, CHUNK)
        elif total <= HELD:
            j = tl.arange(0, HELD)
            live = j < total
            s = tl.load(values_in + r * HELD + j, mask=live, other=-_INF)
            key = _key(s)
            if k > 0:
                floor = _reach(key, live.to(tl.int32), k, floor, high)
            e = tl.exp(s).to(tl.float64)
            e = tl.where(key >= floor.to(tl.int32), e, 0.0)
            if p < 1:
                # beside top_p alone, tokens below the bound have mass too
                whole = tl.where((k > 0) | (part > 0), tl.sum(e, 0), tl.sum(masses, 0))
                floor = _reach(key, e, p.to(tl.float64) * whole, floor, high)
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
                s = tl.div_rn(_chunk(row, ids, V, forbids, banned, E) - base, t)
                kept = (_key(s) >= floor.to(tl.int32)) & (s > -_INF)
                e = tl.where(kept, tl.exp(s), 0.0).to(tl.float64)
                after = before + tl.sum(e, 0)
                if (before <= target) & (after > target):
                    token = i * CHUNK + _first_beyond(e, kept, before, target, CHUNK)
                before = after
    tl.store(tokens + r, tl.where((top > -_INF) & (top < _INF), token, -1).to(tl.int64))


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
    _take_best[(len(tokens),)](best, best_at, tokens, chunks, C=triton.next_power_of_2(chunks), num_warps=1)
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
    _bounds[(count,)](
        best, mass, peaks, bounds, **heat, top_p=top_p, min_p=min_p, top_k=top_k, i_stride=top_k.stride(0), V=vocab,
        chunks=chunks, segments=segments, C=padded, S=triton.next_power_of_2(segments), num_warps=4,
    )  # fmt: skip
    for counting in (True, False):
        _gather[(chunks, count)](
            logits, logits.stride(0), vocab, best, bounds, counts, ids, values, **heat, **forbidden, COUNT=counting,
            CHUNK=CHUNK, C=padded, HELD=HELD, num_warps=4 if counting else 8,
        )  # fmt: skip
    _draw[(count,)](
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
    _chunks[(chunks, count)](
        logits, logits.stride(0), vocab, best, best_at, **{**unused, **arguments}, CHUNK=CHUNK, SEGMENT=SEGMENT,
        num_warps=4,
    )  # fmt: skip
    return best, best_at


def _alike(columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the columns, [R] each, with one stride: they usually are views of one table."""
    if len({column.stride(0) for column in columns}) == 1:
        return columns
    return [column.contiguous() for column in columns]
