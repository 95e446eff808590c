"""How many rows, blocks and bytes the kernels of a mixture of experts need: numbers that a memory plan may use."""

from __future__ import annotations

CHUNK = 256
"""Pairs (token, chosen expert) that a program puts in order."""
LEAST_ROWS = 16
"""Rows of the smallest block of a grouped product."""


def blocks_bound(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks of up to ``rows`` pairs of one expert there are at most; no expert is one more."""
    groups = min(experts + 1, pairs)
    return min(pairs, (pairs + groups * (rows - 1)) // rows)


def workspace_bytes(tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, item_bytes: int) -> int:
    """Return a bound of what ``experts`` holds at once beside its arguments and its result.

    Per pair the hidden channels and the weighted output, and what says which pairs each expert has.
    """
    pairs = tokens * top_k
    values = pairs * intermediate + (pairs * hidden if top_k > 1 else 0)
    counts = -(-pairs // CHUNK) * (1 << experts.bit_length())
    return values * item_bytes + (pairs + 3 * blocks_bound(pairs, experts, LEAST_ROWS) + counts) * 4
