"""A slab: a part of the arena while one kind of state fills it with its items."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Slab:
    """Items lie side by side from ``offset`` on, in units of 256 bytes from the arena's start.

    Handles of items are made when they are first needed: a slab of a hundred thousand small items costs nothing.
    """

    index: int
    """its place among the arena's slabs; -1 is the tail, which never changes hands"""
    offset: int
    capacity: int
    """items that fit"""
    handles: list[int] = field(default_factory=list)
    """of the items made until now, by their place in the slab"""
    free: list[int] = field(default_factory=list)
    """those of ``handles`` that nobody holds: a stack"""
    pinned: int = 0
    """items that must stay where they are"""
    queued: bool = False
    """whether its pool knows that there is room in it"""

    @property
    def used(self) -> int:
        """Items that somebody holds."""
        return len(self.handles) - len(self.free)

    @property
    def has_room(self) -> bool:
        """Whether an item can be taken."""
        return bool(self.free) or len(self.handles) < self.capacity
