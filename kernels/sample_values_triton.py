"""What the kernels that draw tokens compute in common: keys that order values, uniform numbers, parts of rows."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOWEST_KEY = tl.constexpr(-2139095041)
"""``key_of`` of -inf"""
INF = tl.constexpr(float("inf"))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def key_of(value):
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
def uniform(seed, index):
    """Return ``runtime.sampler.uniforms`` of one pair."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + index.to(tl.uint64) * _GOLDEN)
    return (mixed >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def temperature_at(temperature, at):
    """Return a row's temperature, 1 where it is greedy."""
    t = tl.load(temperature + at)
    return tl.where(t > 0, t, 1.0)


@triton.jit
def chunk_logits(logits, ids, V, forbids, stops, E):
    """Return the logits ``ids`` of a row as fp32; -inf outside and where stop tokens are forbidden."""
    v = tl.load(logits + ids, mask=ids < V, other=-INF).to(tl.float32)
    if forbids:
        for i in range(E):
            v = tl.where(ids == tl.load(stops + i).to(tl.int32), -INF, v)
    return v


@triton.jit
def reach(keys, mass, needed, low, high):
    """Return the largest key in [low, high) that keys of ``needed`` mass reach; low if there is none. All int64."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), mass, tl.zeros_like(mass)), 0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def row_top(best, r, chunks, C: tl.constexpr):
    """Return the chunks' maxima, the row's maximum, and the same or 0 where it is not finite."""
    c = tl.arange(0, C)
    tops = tl.load(best + r * chunks + c, mask=c < chunks, other=-INF)
    top = tl.max(tops, 0)
    return tops, top, tl.where((top > -INF) & (top < INF), top, 0.0)


@triton.jit
def row_masses(tops, base, mass, r, chunks, t, C: tl.constexpr):
    """Return the chunks' masses relative to the row's maximum ``base``, after temperature."""
    c = tl.arange(0, C)
    masses = tl.load(mass + r * chunks + c, mask=c < chunks, other=0.0)
    # at 0 where the row's maximum is not finite, and its masses are not used
    below = tl.minimum(tl.div_rn(tops - base, t), 0.0)
    return masses * tl.exp(below).to(tl.float64)
