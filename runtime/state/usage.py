"""Where the bytes of an arena are, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KindUsage:
    """Bytes of one kind of state."""

    name: str
    used_bytes: int
    """of items that somebody holds"""
    free_bytes: int
    """of items in its slabs that nobody holds"""
    available_bytes: int
    """of items that it could be given in all, were nothing else given: free ones, free slabs, and what evacuation of
    other kinds' slabs makes of theirs"""
    rest_bytes: int
    """behind the last item of its slabs"""


@dataclass(frozen=True, kw_only=True)
class ArenaUsage:
    """Bytes of an arena; all but its scratch item is either used by a kind or unused."""

    kinds: tuple[KindUsage, ...]
    free_slab_bytes: int
    """of slabs that no kind has"""
    tail_rest_bytes: int
    """behind the last item of what is no whole slab at the arena's end"""
    stranded_bytes: int
    """Unused bytes that no request of any kind can be given. Let every kind be packed into as few slabs as hold its
    items, with pinned ones where they are. What is left over then can be given as items: the places that a kind has
    free in those slabs to that kind, every other slab to the kind that fills most of it. Stranded is the rest: behind
    the last item of slabs, and of the tail."""
    evacuated_bytes: int
    """moved to empty slabs, since the start"""

    @property
    def used_bytes(self) -> int:
        """Bytes of items that somebody holds."""
        return sum(kind.used_bytes for kind in self.kinds)

    @property
    def unused_bytes(self) -> int:
        """Bytes that nobody holds."""
        in_slabs = sum(kind.free_bytes + kind.rest_bytes for kind in self.kinds)
        return in_slabs + self.free_slab_bytes + self.tail_rest_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the unused bytes that are scattered in slabs of kinds, and so another kind's only by evacuation."""
        scattered = self.unused_bytes - self.free_slab_bytes
        return scattered / self.unused_bytes if self.unused_bytes else 0.0
