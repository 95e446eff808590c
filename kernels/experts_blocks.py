"""How the Triton kernels of experts cut their work: measured for the shapes of known models, a rule for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Tile:
    """What a program of one of the two products takes, and how it is launched."""

    outputs: int
    """channels of the result (with a gated activation the first product reads twice as many rows of weights)"""
    inputs: int
    """columns of weights at a time"""
    warps: int = 4
    stages: int = 3
    """depth of the software pipeline of products of blocks"""


@dataclass(frozen=True)
class Blocks:
    """One way to run T tokens through k of E experts each."""

    way: Literal["vector", "shared", "ordered"]
    """vector: each pair by itself; shared: pairs find those with their expert; ordered: kernels group them first"""
    first: Tile
    second: Tile
    rows: int = 16
    """pairs a block, at most; vector takes one"""
    group: int = 8
    """blocks of pairs that programs take turns at before they go on to other outputs; ordered only"""


MOST_SHARED = 512
"""Pairs among which a program can look for those with its expert."""
MOST_VECTOR_EXPERTS = 32
"""Experts of a token whose weights a program of the second product holds at once, a row each."""

MEASURED: dict[tuple[int, int, int, int, int], Blocks] = {
    (11, 10, 128, 8, 1): Blocks("vector", Tile(1, 2048, 2, 3), Tile(1, 1024, 2, 3)),
    (11, 10, 128, 8, 2): Blocks("shared", Tile(32, 128, 4, 4), Tile(64, 64, 4, 6), rows=8),
    (11, 10, 128, 8, 4): Blocks("shared", Tile(32, 128, 4, 4), Tile(128, 128, 4, 3), rows=8),
    (11, 10, 128, 8, 8): Blocks("shared", Tile(32, 128, 4, 4), Tile(64, 128, 4, 4), rows=8),
    (11, 10, 128, 8, 16): Blocks("shared", Tile(32, 64, 4, 6), Tile(128, 128, 4, 3), rows=16),
    (11, 10, 128, 8, 32): Blocks("shared", Tile(32, 64, 4, 6), Tile(128, 128, 4, 3), rows=16),
    (11, 10, 128, 8, 64): Blocks("ordered", Tile(32, 128, 4, 4), Tile(128, 128, 4, 3), rows=16, group=1),
    (11, 10, 128, 8, 128): Blocks("ordered", Tile(64, 128, 8, 3), Tile(128, 128, 4, 3), rows=16, group=1),
    (11, 10, 128, 8, 256): Blocks("ordered", Tile(32, 128, 4, 4), Tile(128, 64, 8, 4), rows=32, group=8),
    (11, 10, 128, 8, 512): Blocks("ordered", Tile(64, 64, 8, 4), Tile(128, 64, 4, 3), rows=64, group=1),
    (11, 10, 128, 8, 2048): Blocks("ordered", Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), rows=128, group=4),
    (11, 10, 128, 8, 8192): Blocks("ordered", Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), rows=128, group=1),
    (12, 14, 8, 2, 1): Blocks("vector", Tile(1, 4096, 4, 3), Tile(4, 1024, 4, 3)),
    (12, 14, 8, 2, 2): Blocks("shared", Tile(32, 128, 4, 4), Tile(64, 128, 4, 4), rows=16),
    (12, 14, 8, 2, 4): Blocks("shared", Tile(32, 256, 4, 3), Tile(128, 128, 4, 3), rows=8),
    (12, 14, 8, 2, 8): Blocks("shared", Tile(64, 128, 4, 3), Tile(64, 128, 4, 4), rows=16),
    (12, 14, 8, 2, 16): Blocks("shared", Tile(64, 128, 4, 3), Tile(64, 128, 4, 4), rows=16),
    (12, 14, 8, 2, 32): Blocks("shared", Tile(64, 128, 4, 3), Tile(128, 128, 4, 3), rows=16),
    (12, 14, 8, 2, 64): Blocks("ordered", Tile(32, 128, 4, 4), Tile(64, 128, 4, 4), rows=32, group=8),
    (12, 14, 8, 2, 128): Blocks("ordered", Tile(64, 64, 8, 4), Tile(128, 64, 8, 4), rows=64, group=1),
    (12, 14, 8, 2, 256): Blocks("ordered", Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), rows=128, group=4),
    (12, 14, 8, 2, 512): Blocks("ordered", Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), rows=128, group=8),
    (12, 14, 8, 2, 2048): Blocks("ordered", Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), rows=128, group=16),
    (12, 14, 8, 2, 8192): Blocks("ordered", Tile(128, 64, 8, 3), Tile(256, 64, 8, 4), rows=128, group=16),
}
"""By class of shape. One H200, bfloat16, early launch, weights that no cache holds."""


def shape_class(
    hidden: int, intermediate: int, experts: int, top_k: int, tokens: int
) -> tuple[int, int, int, int, int]:
    """Return what a shape is measured as: C and F by the power of two above, E, k, and T by the power of two above."""
    above = 1 << (max(tokens, 1) - 1).bit_length()
    return (hidden - 1).bit_length(), (intermediate - 1).bit_length(), experts, top_k, above


def choose(hidden: int, intermediate: int, experts: int, top_k: int, tokens: int, dtype: torch.dtype) -> Blocks:
    """Return the blocks for ``tokens`` rows of C = ``hidden``, and F = ``intermediate``.

    What was measured holds for 16-bit weights.
    """
    found = MEASURED.get(shape_class(hidden, intermediate, experts, top_k, tokens))
    if found is not None and dtype.itemsize == 2:
        return found
    return general(hidden, intermediate, experts, top_k, tokens, dtype)


def general(hidden: int, intermediate: int, experts: int, top_k: int, tokens: int, dtype: torch.dtype) -> Blocks:
    """Return blocks that are right for any shape, and good for most."""
    pairs = tokens * top_k
    if tokens == 1 and top_k <= MOST_VECTOR_EXPERTS:
        return Blocks(
            "vector", _vector(hidden, 1, 16384 // dtype.itemsize), _vector(intermediate, top_k, 32768 // dtype.itemsize)
        )
    way: Literal["shared", "ordered"] = "shared" if pairs <= MOST_SHARED // 2 else "ordered"
    if dtype == torch.float32:
        # summed up without the matrix units
        return Blocks(way, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    # tl.dot takes 16 columns at least
    long, wide = (max(16, min(64, 1 << (size - 1).bit_length())) for size in (hidden, intermediate))
    if way == "shared":
        return Blocks(way, Tile(32, 2 * long, 4, 4), Tile(64, 2 * wide, 4, 4))
    each = pairs / experts
    if each <= 16:
        return Blocks(way, Tile(32, 2 * long, 4, 4), Tile(64, 2 * wide, 4, 4), rows=16, group=1)
    if each <= 64:
        return Blocks(way, Tile(64, long, 4, 4), Tile(128, wide, 4, 4), rows=32 if each <= 32 else 64)
    return Blocks(way, Tile(128, long, 8, 3), Tile(128, wide, 8, 3), rows=128)


def choose_invariant(hidden: int, intermediate: int, dtype: torch.dtype) -> Blocks:
    """Return blocks for any number of tokens, where a row's result may depend on that row alone."""
    if dtype == torch.float32:
        return Blocks("ordered", Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    long, wide = (max(16, min(64, 1 << (size - 1).bit_length())) for size in (hidden, intermediate))
    return Blocks("ordered", Tile(64, long, 8, 4), Tile(128, wide, 8, 4), rows=64)


def _vector(width: int, rows: int, most: int) -> Tile:
    """Return the tile of a product of single rows: a whole row of weights if ``most`` elements hold one each."""
    whole = max(16, 1 << (width - 1).bit_length())
    padded = 1 << (rows - 1).bit_length()
    columns = min(whole, max(128, most // padded))
    return Tile(max(1, most // (padded * columns)), columns)
