"""How many tokens the kernels of recurrent states take at a time on a GPU, and the bytes that these need meanwhile."""

from __future__ import annotations

CHUNK = 64
"""Tokens whose products with each other are made at once."""
FP32_CHUNK = 16
"""The same in fp32: its products are made by ordinary instructions, in code that grows with their size."""
SEGMENT = 512
"""Tokens of a prompt that scans take in a row, beside other segments; those of all but the first twice."""


def chunk_tokens(item_bytes: int) -> int:
    """Return how many tokens a chunk has in a model of such elements."""
    return FP32_CHUNK if item_bytes == 4 else CHUNK


def delta_bytes(
    tokens: int, sequences: int, heads: int, k_dim: int, v_dim: int, by_channel: bool, item_bytes: int
) -> int:
    """Return what ``delta_rule`` holds of the chunks of a step, beside its arguments and its result."""
    chunk = chunk_tokens(item_bytes)
    fades = (tokens // chunk + sequences) * heads * (k_dim if by_channel else 1)
    return tokens * heads * (3 * k_dim + v_dim + chunk) * item_bytes + fades * 4


def segment_slots(tokens: int) -> int:
    """Return the most segments of a step that are not the first of their sequence."""
    return max(tokens - 1, 0) // SEGMENT


def ssm_bytes(tokens: int, heads: int, dim: int, size: int) -> int:
    """Return what ``ssm_scan`` holds of the segments of a step, beside its arguments and its result."""
    return segment_slots(tokens) * heads * (dim * size + 1) * 4


def selective_bytes(tokens: int, channels: int, size: int) -> int:
    """Return what ``selective_scan`` holds of the segments of a step, beside its arguments and its result."""
    return segment_slots(tokens) * channels * (size + 1) * 4
