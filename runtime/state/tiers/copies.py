"""Copies of byte ranges between two memories, as few as can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.kernels.backend.protocol import Backend


def copy_ranges(backend: Backend, source: Tensor, target: Tensor, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Copy (begin in ``source``, begin in ``target``, bytes) for all ``ranges``, without waiting where memory allows.

    Ranges that follow each other in both memories are copied as one. Must be called on a stream. Shapes: both [bytes]
    uint8; ranges of ``target`` do not overlap.
    """
    merged: list[tuple[int, int, int]] = []
    for begin, there, size in sorted(ranges):
        if merged:
            last_begin, last_there, last_size = merged[-1]
            if (last_begin + last_size, last_there + last_size) == (begin, there):
                merged[-1] = (last_begin, last_there, last_size + size)
                continue
        merged.append((begin, there, size))
    backend.copy(source, target, merged)
