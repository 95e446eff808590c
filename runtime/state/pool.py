"""The items of one kind of state: stable handles, reference counts, and who took what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from treadle.graph.state import UNIT_BYTES
from treadle.runtime.state.slab import Slab

if TYPE_CHECKING:
    from treadle.runtime.state.arena import Arena

Handle: TypeAlias = int
"""A small number that names an item for as long as somebody holds it, wherever its bytes are moved."""
TAIL = -1
MADE_AT_ONCE = 64
"""Handles that are made when a slab has none left, if no more are asked for."""


class Pool:
    """Hands out items of one kind from the slabs that the arena lends it.

    An item is shared by counting references: every sequence that uses it and the prefix tree hold one each. Pins are
    counted beside references: an item that is pinned neither moves nor becomes free. Made by the arena.
    """

    def __init__(self, arena: Arena, kind: int, name: str, item_bytes: int) -> None:
        self.kind, self.name, self.item_bytes = kind, name, item_bytes
        self.total = 0
        """items of its slabs"""
        self.used = 0
        """items that are referenced or pinned"""
        self.num_refs = 0
        """references that exist, over all items"""
        self.pinned_slabs = 0
        """slabs, the tail left out, that hold a pinned item"""
        self._arena = arena
        self._units = item_bytes // UNIT_BYTES
        self._slabs: dict[int, Slab] = {}
        # Indices of slabs with room, a heap: low slabs fill first, so that high ones become empty. Entries of slabs
        # that are full or gone since are dropped when they come up.
        self._open: list[int] = []
        # By handle:
        self._refs: list[int] = []
        self._owner: list[str] = []
        self._offset: list[int] = []
        self._slab: list[Slab] = []
        self._pins: dict[Handle, int] = {}
        self._retired: list[Handle] = []

    @property
    def free(self) -> int:
        """Items of its slabs that nobody holds; with free slabs, and those of other kinds, there may be more."""
        return self.total - self.used

    @property
    def num_slabs(self) -> int:
        """Slabs that it has, the tail left out."""
        return len(self._slabs) - (TAIL in self._slabs)

    def offset(self, handle: Handle) -> int:
        """Return where an item begins now, in units of 256 bytes from the arena's start; ``take`` may move it."""
        return self._offset[handle]

    def offsets(self, handles: Sequence[Handle]) -> list[int]:
        """Return ``offset`` of each."""
        offset = self._offset
        return [offset[handle] for handle in handles]

    def refs(self, handle: Handle) -> int:
        """Return how many hold an item, pins left out."""
        return self._refs[handle]

    def owner(self, handle: Handle) -> str:
        """Return who took an item last."""
        return self._owner[handle] if handle < len(self._owner) else "nobody"

    def take(self, count: int, owner: str) -> list[Handle]:
        """Return ``count`` items with one reference each; ``owner`` is named if they are ever found leaked.

        The bytes are whatever they were. There must be room: ask ``Arena.can_take``. Items of other kinds may be moved
        to make it, see ``Arena.moves``.
        """
        if count > self.total - self.used:
            available = self._arena.available(self.kind)
            assert count <= available, f"{owner} takes {count} items of {available} free, kind {self.name}"
        if count <= 0:
            return []
        handles: list[Handle] = []
        lacking = count
        while lacking:
            slab = self._roomy() or self._arena.lend(self)
            if len(slab.free) < lacking:
                self._make(slab, max(lacking - len(slab.free), MADE_AT_ONCE))
            part = slab.free[: -lacking - 1 : -1]
            del slab.free[-len(part) :]
            handles += part
            lacking -= len(part)
        refs, owners = self._refs, self._owner
        for handle in handles:
            assert refs[handle] == 0, f"item {handle} of {self.name} was free and held"
            refs[handle] = 1
            owners[handle] = owner
        self.used += count
        self.num_refs += count
        return handles

    def share(self, handles: Sequence[Handle]) -> None:
        """Add a reference to items that somebody already holds."""
        refs = self._refs
        for handle in handles:
            assert refs[handle] > 0, f"item {handle} of {self.name} is shared but nobody holds it"
            refs[handle] += 1
        self.num_refs += len(handles)

    def release(self, handles: Sequence[Handle]) -> None:
        """Drop one reference of each item; the last one frees it, and its slab if that is empty then."""
        refs, pins, slabs = self._refs, self._pins, self._slab
        for handle in handles:
            left = refs[handle] - 1
            assert left >= 0, f"item {handle} of {self.name} is freed twice"
            refs[handle] = left
            if left == 0 and handle not in pins:
                slab = slabs[handle]
                slab.free.append(handle)
                self.used -= 1
                if not slab.queued or len(slab.free) == len(slab.handles):
                    self._settle(slab)
        self.num_refs -= len(handles)

    def pin(self, handles: Iterable[Handle]) -> None:
        """Keep items, which somebody holds, where they are until ``unpin``: something beside the stream copies them."""
        for handle in handles:
            assert self._refs[handle] > 0, f"item {handle} of {self.name} is pinned but nobody holds it"
            if handle not in self._pins:
                slab = self._slab[handle]
                slab.pinned += 1
                self.pinned_slabs += slab.pinned == 1 and slab.index != TAIL
            self._pins[handle] = self._pins.get(handle, 0) + 1

    def unpin(self, handles: Iterable[Handle]) -> None:
        """Undo one ``pin`` of each item; those that nobody holds any more become free."""
        for handle in handles:
            pins = self._pins.get(handle, 0) - 1
            assert pins >= 0, f"item {handle} of {self.name} is unpinned but not pinned"
            if pins:
                self._pins[handle] = pins
                continue
            del self._pins[handle]
            slab = self._slab[handle]
            slab.pinned -= 1
            self.pinned_slabs -= slab.pinned == 0 and slab.index != TAIL
            if self._refs[handle] == 0:
                slab.free.append(handle)
                self.used -= 1
                self._settle(slab)

    def reclaim(self, held: Iterable[Handle]) -> dict[str, int]:
        """Make the references exactly those of ``held`` (an item occurs once for each holder). Pins stay.

        Returns who had taken the items that turned out leaked, with their number.
        """
        expected: dict[Handle, int] = {}
        for handle in held:
            expected[handle] = expected.get(handle, 0) + 1
        leaked: dict[str, int] = {}
        for slab in list(self._slabs.values()):
            for handle in slab.handles:
                if self._refs[handle] > expected.get(handle, 0):
                    leaked[self.owner(handle)] = leaked.get(self.owner(handle), 0) + 1
                self._refs[handle] = expected.get(handle, 0)
            before = len(slab.free)
            slab.free = [each for each in reversed(slab.handles) if not self._refs[each] and each not in self._pins]
            self.used -= len(slab.free) - before
            self._settle(slab)
        self.num_refs = sum(expected.values())
        return leaked

    def held(self) -> Iterator[tuple[Handle, int, int]]:
        """Yield handle, offset and references of all items that are referenced or pinned."""
        for slab in self._slabs.values():
            free = set(slab.free)
            yield from (
                (handle, self._offset[handle], self._refs[handle]) for handle in slab.handles if handle not in free
            )

    def attach(self, index: int, offset: int, capacity: int) -> Slab:
        """Take a slab over from the arena; it begins at ``offset``, in units of 256 bytes."""
        slab = self._slabs[index] = Slab(index, offset, capacity)
        self.total += capacity
        self._queue(slab)
        return slab

    def lightest(self) -> Slab | None:
        """Return the slab that is emptied with the fewest moves; None if the other slabs have no room for its items."""
        loose = [slab for slab in self._slabs.values() if not slab.pinned and slab.index != TAIL]
        slab = min(loose, key=lambda each: (each.used, -each.index), default=None)
        return slab if slab is not None and slab.used <= self.free - (slab.capacity - slab.used) else None

    def evacuate(self, slab: Slab) -> Iterator[tuple[Handle, int, int]]:
        """Move a slab's items into the other slabs and give it up; yield handle, old and new offset of each."""
        del self._slabs[slab.index]
        self.total -= slab.capacity
        free = set(slab.free)
        for place, handle in enumerate(slab.handles):
            if handle not in free:
                yield (handle, *self._swap(slab, place, handle))
        self._retired += slab.handles

    def _swap(self, slab: Slab, place: int, handle: Handle) -> tuple[int, int]:
        """Exchange an item's place with a free one of another slab; return its old and its new offset."""
        target = self._roomy()
        assert target is not None, f"no room for what is in a slab of {self.name}"
        if not target.free:
            self._make(target, MADE_AT_ONCE)
        other = target.free.pop()
        source, offset = self._offset[handle], self._offset[other]
        target.handles[(offset - target.offset) // self._units] = handle
        slab.handles[place] = other
        self._offset[handle], self._offset[other] = offset, source
        self._slab[handle] = target
        return source, offset

    def _roomy(self) -> Slab | None:
        """Return the lowest slab with room."""
        while self._open:
            slab = self._slabs.get(self._open[0])
            if slab is not None and slab.has_room:
                return slab
            heappop(self._open)
            if slab is not None:
                slab.queued = False
        return None

    def _make(self, slab: Slab, count: int) -> None:
        """Give handles to the next ``count`` items of a slab, or as many as it has."""
        made = len(slab.handles)
        count = min(count, slab.capacity - made)
        reused = self._retired[-count:] if count else []
        del self._retired[len(self._retired) - len(reused) :]
        for place, handle in enumerate(reused, made):
            self._offset[handle] = slab.offset + place * self._units
            self._slab[handle] = slab
        new = range(len(self._refs), len(self._refs) + count - len(reused))
        first = slab.offset + (made + len(reused)) * self._units
        self._refs += [0] * len(new)
        self._owner += ["nobody"] * len(new)
        self._offset += range(first, first + len(new) * self._units, self._units)
        self._slab += [slab] * len(new)
        slab.handles += reused
        slab.handles += new
        # Below what is free already, the first place on top.
        slab.free[:0] = slab.handles[: made - 1 if made else None : -1]

    def _settle(self, slab: Slab) -> None:
        """After items of a slab became free: give it back if it is empty, else remember that there is room."""
        if len(slab.free) == len(slab.handles) and slab.index != TAIL:
            del self._slabs[slab.index]
            self.total -= slab.capacity
            self._retired += slab.handles
            self._arena.give_back(slab.index)
        else:
            self._queue(slab)

    def _queue(self, slab: Slab) -> None:
        if not slab.queued:
            slab.queued = True
            heappush(self._open, slab.index)
