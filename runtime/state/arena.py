"""The arena: one byte range of a device, from which every kind of state is given its slab."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from treadle.graph.state import UNIT_BYTES, PagedKV, round_up
from treadle.kernels.backend.protocol import Backend


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A part of the arena that one kind of state cuts into pages. In units of 256 bytes from the arena's start."""

    offset: int
    num_units: int


class ArenaError(ValueError):
    """An arena too small for what it must hold; says the bytes that would do."""


class Arena:
    """``bytes``, [num_bytes] uint8 on the device, and what of it is taken.

    It begins with a scratch page at offset 0 that belongs to nobody: unused entries of page tables point at it.
    """

    def __init__(self, backend: Backend, num_bytes: int, *, scratch_bytes: int) -> None:
        self._next = round_up(scratch_bytes, UNIT_BYTES)
        if self._next > num_bytes:
            raise ArenaError(f"an arena of {num_bytes} bytes is smaller than its scratch page; it needs {self._next}")
        self.bytes: Tensor = backend.allocate(num_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes not yet taken by a slab."""
        return self.bytes.numel() - self._next

    def take(self, num_bytes: int) -> Slab:
        """Return a slab of at least ``num_bytes``. Raises ArenaError if less is left."""
        size = round_up(num_bytes, UNIT_BYTES)
        if size > self.free_bytes:
            raise ArenaError(f"a slab of {size} bytes does not fit: {self.free_bytes} of the arena are left")
        slab = Slab(offset=self._next // UNIT_BYTES, num_units=size // UNIT_BYTES)
        self._next += size
        return slab


def arena_bytes(kv: PagedKV, num_pages: int) -> int:
    """Return the bytes of an arena that gives ``num_pages`` pages of ``kv`` to sequences, its scratch page included."""
    return (1 + num_pages) * kv.page_bytes
