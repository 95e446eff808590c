"""How the Triton kernels for few rows cut a product: measured for the shapes of known models, a rule for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Op = Literal["linear", "linear_add", "norm_gated_linear"]


@dataclass(frozen=True)
class Blocks:
    """One way to cut a product of T rows of x with N rows of weights."""

    way: Literal["held", "looped", "dot"]
    """see ``linear_triton``"""
    rows: int
    """of weights that a program takes (with a gated activation: of each half)"""
    columns: int
    """of weights that it takes at a time; held: at least all"""
    warps: int = 4
    stages: int = 0
    """depth of the software pipeline of dot, 0 = Triton's default"""


LONGEST_HELD = 8192
"""columns of weights that a program can hold"""

MEASURED: dict[tuple[Op, int, int, int], Blocks] = {
    ("linear", 12, 10, 1): Blocks("held", 4, 1024, 2),
    ("linear", 12, 10, 2): Blocks("held", 4, 1024, 2),
    ("linear", 12, 10, 4): Blocks("dot", 32, 256, 4, 4),
    ("linear", 12, 10, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear", 12, 12, 1): Blocks("looped", 2, 1024),
    ("linear", 12, 12, 2): Blocks("held", 2, 4096),
    ("linear", 12, 12, 4): Blocks("dot", 32, 256, 4, 4),
    ("linear", 12, 12, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear", 16, 12, 1): Blocks("held", 1, 4096, 8),
    ("linear", 16, 12, 2): Blocks("held", 2, 4096),
    ("linear", 16, 12, 4): Blocks("dot", 32, 128, 4, 5),
    ("linear", 16, 12, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear", 17, 10, 1): Blocks("held", 4, 1024, 2),
    ("linear", 17, 10, 2): Blocks("held", 4, 1024, 2),
    ("linear", 17, 10, 4): Blocks("dot", 64, 64, 4, 6),
    ("linear", 17, 10, 8): Blocks("dot", 64, 64, 4, 6),
    ("linear_add", 10, 11, 1): Blocks("held", 8, 2048, 8),
    ("linear_add", 10, 11, 2): Blocks("held", 4, 2048),
    ("linear_add", 10, 11, 4): Blocks("looped", 2, 1024, 8),
    ("linear_add", 10, 11, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 10, 12, 1): Blocks("looped", 1, 2048, 8),
    ("linear_add", 10, 12, 2): Blocks("held", 2, 4096),
    ("linear_add", 10, 12, 4): Blocks("looped", 2, 1024, 8),
    ("linear_add", 10, 12, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 12, 1): Blocks("looped", 4, 1024),
    ("linear_add", 12, 12, 2): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 12, 4): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 12, 8): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 14, 1): Blocks("looped", 4, 1024),
    ("linear_add", 12, 14, 2): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 14, 4): Blocks("dot", 32, 256, 4, 4),
    ("linear_add", 12, 14, 8): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 11, 10, 1): Blocks("held", 4, 1024),
    ("norm_gated_linear", 11, 10, 2): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 11, 10, 4): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 11, 10, 8): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 13, 12, 1): Blocks("held", 2, 4096, 8),
    ("norm_gated_linear", 13, 12, 2): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 13, 12, 4): Blocks("dot", 32, 256, 4, 4),
    ("norm_gated_linear", 13, 12, 8): Blocks("dot", 64, 128, 4, 4),
}
"""By op and class of shape. One H200, bfloat16, early launch, weights that no cache holds."""


def shape_class(outputs: int, width: int, tokens: int) -> tuple[int, int, int]:
    """Return what a shape is measured as: the exponents of the power of two below N and of that above K, and 1 to 8."""
    return outputs.bit_length() - 1, (width - 1).bit_length(), 1 << (max(tokens, 1) - 1).bit_length()


def choose(op: Op, outputs: int, width: int, tokens: int, dtype: torch.dtype) -> Blocks:
    """Return the blocks for T = ``tokens`` rows of x, N = ``outputs`` and K = ``width``.

    What was measured holds for 16-bit weights; sums of float32 need the wider registers of the general rule.
    """
    found = MEASURED.get((op, *shape_class(outputs, width, tokens)))
    if found is not None and dtype.itemsize == 2 and (found.way != "held" or found.columns >= width):
        return found
    return general(op, width, tokens, dtype)


def general(op: Op, width: int, tokens: int, dtype: torch.dtype) -> Blocks:
    """Return blocks that are right for any shape, and good for most."""
    whole = 1 << (width - 1).bit_length()
    if tokens == 1:
        # A norm needs the whole row first; without one, steps of 2048 columns keep more programs in flight.
        longest = LONGEST_HELD if op == "norm_gated_linear" else 4096
        if whole <= longest:
            return Blocks("held", max(1, 4096 // whole), whole, 8 if whole > 4096 else 4)
        return Blocks("looped", 1, 2048)
    if dtype == torch.float32:
        return Blocks("looped", 1, min(whole, 512))
    # tl.dot takes 16 columns at least
    return Blocks("dot", 16, max(16, min(whole, 256)), 4, 4)
