"""Copies of byte ranges between two memories, as few calls as can be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_ranges(source: Tensor, target: Tensor, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Copy (begin in ``source``, begin in ``target``, bytes) for all ``ranges``, without waiting where memory allows.

    Ranges that follow each other in both memories are copied as one; all of them are one call of torch. Must be called
    on a stream. Shapes: both [bytes] uint8; ranges of ``target`` do not overlap.
    """
    merged: list[tuple[int, int, int]] = []
    for begin, there, size in sorted(ranges):
        if merged:
            last_begin, last_there, last_size = merged[-1]
            if (last_begin + last_size, last_there + last_size) == (begin, there):
                merged[-1] = (last_begin, last_there, last_size + size)
                continue
        merged.append((begin, there, size))
    if merged:
        torch._foreach_copy_(
            [target[there : there + size] for _, there, size in merged],
            [source[begin : begin + size] for begin, _, size in merged],
            non_blocking=True,
        )
