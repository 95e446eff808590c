"""How an arena is cut into slabs that several kinds of items share, as arithmetic. No torch here.

Every kind of state has items of its own size: pages of keys and values, blocks of recurrent state. A slab belongs to
one kind at a time, which fills it with its items. All slabs are equally large, so that any kind can use what another
one has given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from treadle.graph.state import UNIT_BYTES, round_up

MOST_SLABS = 1024
"""An arena of small items has about so many slabs at most, lest the host be busy with them."""
CANDIDATES = 512
"""Sizes of a slab that are compared."""


@dataclass(frozen=True, kw_only=True)
class Slabs:
    """An arena's parts, in this order: the scratch item, ``num_slabs`` slabs, and the tail that is no whole slab.

    The tail belongs for good to the kind that fills most of it. Sizes in bytes; all start at multiples of 256.
    """

    item_bytes: tuple[int, ...]
    """of every kind"""
    scratch_bytes: int
    slab_bytes: int
    num_slabs: int
    tail_bytes: int
    tail_kind: int

    def items_per_slab(self, kind: int) -> int:
        """Return how many items of a kind a slab holds."""
        return self.slab_bytes // self.item_bytes[kind]

    def tail_items(self, kind: int) -> int:
        """Return how many items of a kind are in the tail: none but for the kind that it belongs to."""
        return self.tail_bytes // self.item_bytes[kind] if kind == self.tail_kind else 0

    def needed(self, kind: int, count: int) -> int:
        """Return how many slabs hold ``count`` items of a kind, the tail filled first."""
        return max(0, -(-(count - self.tail_items(kind)) // self.items_per_slab(kind)))

    def holds(self, counts: Sequence[int]) -> bool:
        """Return whether so many items of every kind fit at once."""
        return sum(self.needed(kind, count) for kind, count in enumerate(counts)) <= self.num_slabs

    def most(self, kind: int) -> int:
        """Return how many items of a kind there are if it has all slabs."""
        return self.num_slabs * self.items_per_slab(kind) + self.tail_items(kind)


def slab_bytes(item_bytes: Sequence[int], num_bytes: int) -> int:
    """Return the size of the slabs that ``num_bytes`` are cut into: a whole number of the largest items.

    Of sizes between a thousandth and an eighth of the bytes that one is chosen which loses least: by what items leave
    over in a slab and behind the last one, and by the half slab that every kind of several has not filled on average.
    """
    return _slab_bytes(tuple(item_bytes), num_bytes)


@lru_cache(maxsize=4096)
def _slab_bytes(item_bytes: tuple[int, ...], num_bytes: int) -> int:
    largest, kinds = max(item_bytes), len(item_bytes)
    if kinds == 1 or num_bytes < largest:
        return largest * max(1, num_bytes // (largest * (MOST_SLABS // 4)))
    first = max(1, num_bytes // (largest * MOST_SLABS))
    last = max(first, num_bytes // (8 * largest))

    def lost(size: int) -> float:
        left_over = max(size % item for item in item_bytes)
        tail = min((num_bytes % size) % item for item in item_bytes)
        return left_over / size + (tail + kinds * size / 2) / num_bytes

    return min((count * largest for count in range(first, min(last, first + CANDIDATES) + 1)), key=lost)


def cut_arena(item_bytes: Sequence[int], num_bytes: int, scratch_bytes: int | None = None) -> Slabs:
    """Return how an arena of ``num_bytes`` is cut; the scratch item is as large as the largest unless given.

    An arena below its scratch item has no slabs.
    """
    scratch = round_up(max(item_bytes) if scratch_bytes is None else scratch_bytes, UNIT_BYTES)
    left = max(0, num_bytes - scratch)
    size = slab_bytes(item_bytes, left)
    tail = left % size
    return Slabs(
        item_bytes=tuple(item_bytes),
        scratch_bytes=scratch,
        slab_bytes=size,
        num_slabs=left // size,
        tail_bytes=tail,
        tail_kind=min(range(len(item_bytes)), key=lambda kind: tail % item_bytes[kind]),
    )


def least_bytes(item_bytes: Sequence[int], counts: Sequence[int], scratch_bytes: int | None = None) -> int:
    """Return the bytes of a small arena that holds ``counts`` items of every kind at once, its scratch included.

    With one kind there is no smaller one. With several an arena a little smaller may happen to be cut better.
    """
    scratch = round_up(max(item_bytes) if scratch_bytes is None else scratch_bytes, UNIT_BYTES)
    low = scratch + sum(item * count for item, count in zip(item_bytes, counts))
    if cut_arena(item_bytes, low, scratch).holds(counts):
        return low
    high = 2 * low
    while not cut_arena(item_bytes, high, scratch).holds(counts):
        high *= 2
    # ``high`` holds them, ``low`` does not.
    while high - low > UNIT_BYTES:
        middle = round_up((low + high) // 2, UNIT_BYTES)
        if cut_arena(item_bytes, middle, scratch).holds(counts):
            high = middle
        else:
            low = middle
    return high
