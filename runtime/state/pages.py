"""The page allocator of one state kind: handles, reference counts, and who took what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from treadle.graph.state import UNIT_BYTES, PagedKV, round_up
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.state.arena import ArenaError


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A part of the arena that one kind of state cuts into pages. In units of 256 bytes from the arena's start."""

    offset: int
    num_units: int


class PageArena:
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


class PageAllocator:
    """Hands out the pages of a slab. A handle is the page's offset in the arena, in units of 256 bytes.

    A page is shared by counting references: every sequence that uses it and the prefix tree hold one each.
    """

    def __init__(self, slab: Slab, kv: PagedKV) -> None:
        self.total = slab.num_units // kv.page_units
        handles = range(slab.offset, slab.offset + self.total * kv.page_units, kv.page_units)
        # A stack: the page given back last is the one most likely still in a cache.
        self._free = list(reversed(handles))
        self._refs = dict.fromkeys(handles, 0)
        self._owner: dict[int, str] = {}
        self.num_refs = 0
        """references that exist, over all pages"""

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def refs(self, page: int) -> int:
        """Return how many hold ``page``."""
        return self._refs[page]

    def owner(self, page: int) -> str:
        """Return who took ``page`` last."""
        return self._owner.get(page, "nobody")

    def take(self, count: int, owner: str) -> list[int]:
        """Return ``count`` pages with one reference each; ``owner`` is named if they are ever found leaked."""
        assert count <= len(self._free), f"{owner} takes {count} pages of {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            assert self._refs[page] == 0, f"page {page} was free and held"
            self._refs[page] = 1
            self._owner[page] = owner
        self.num_refs += count
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to pages that somebody already holds."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is shared but nobody holds it"
            self._refs[page] += 1
        self.num_refs += len(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; the last one frees it."""
        for page in pages:
            refs = self._refs[page] - 1
            assert refs >= 0, f"page {page} is freed twice"
            self._refs[page] = refs
            if refs == 0:
                self._free.append(page)
        self.num_refs -= len(pages)

    def reclaim(self, held: Iterable[int]) -> dict[str, int]:
        """Make the references exactly those of ``held`` (a page occurs once for each holder).

        Returns who had taken the pages that turned out leaked, with their number.
        """
        expected = dict.fromkeys(self._refs, 0)
        for page in held:
            expected[page] += 1
        leaked: dict[str, int] = {}
        for page, refs in self._refs.items():
            if refs > expected[page]:
                leaked[self.owner(page)] = leaked.get(self.owner(page), 0) + 1
        self._refs = expected
        self._free = [page for page, refs in reversed(expected.items()) if refs == 0]
        self.num_refs = sum(expected.values())
        return leaked
