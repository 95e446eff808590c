"""The arena: one byte range of a device that all kinds of state share, in slabs that pass from one to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from torch import Tensor

from treadle.graph.slabs import cut_arena, least_bytes
from treadle.graph.state import UNIT_BYTES
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.state.pool import TAIL, Handle, Pool
from treadle.runtime.state.slab import Slab
from treadle.runtime.state.usage import ArenaUsage, KindUsage


class ArenaError(ValueError):
    """An arena too small for what it must hold; says the bytes that would do."""


@dataclass(frozen=True)
class Kind:
    """What the arena is asked to hold: items of equal size, a whole number of units of 256 bytes."""

    name: str
    item_bytes: int


class Move(NamedTuple):
    """Bytes to be copied inside the arena. In units of 256 bytes; source and target do not overlap."""

    source: int
    target: int
    num_bytes: int


class Arena:
    """``bytes``, [num_bytes] uint8 on the device, and the pools that give out its items.

    It begins with a scratch item at offset 0 that belongs to nobody: unused entries of tables point at it. A kind that
    needs room takes a free slab, else the one of another kind that is emptied with the fewest bytes moved; empty slabs
    go back at once.

    ``take`` only notes what it moves. The copies of ``moves`` must be done on the stream, in order, before anything
    that was planned after; whoever knows the offset of one of the ``moved`` handles asks for it anew. Both lists are
    for the reader to clear.
    """

    def __init__(self, backend: Backend, num_bytes: int, kinds: Sequence[Kind], *, scratch_bytes: int) -> None:
        """Raises ArenaError if there is no room for one item of every kind at once."""
        items = [kind.item_bytes for kind in kinds]
        assert all(item > 0 and item % UNIT_BYTES == 0 for item in items), f"items of {items} bytes are no whole units"
        self.slabs = cut_arena(items, num_bytes, scratch_bytes)
        if num_bytes < self.slabs.scratch_bytes or not self.slabs.holds([1] * len(items)):
            what = " and ".join(f"one of {kind.item_bytes} bytes ({kind.name})" for kind in kinds)
            least = least_bytes(items, [1] * len(items), scratch_bytes)
            raise ArenaError(
                f"an arena of {num_bytes} bytes does not hold a scratch item of {self.slabs.scratch_bytes} and {what};"
                f" it needs {least}"
            )
        self.moves: list[Move] = []
        self.moved: list[tuple[int, Handle]] = []
        """kind and handle of every item that was moved"""
        self.evacuated_bytes = 0
        """bytes moved until now"""
        self._pools = tuple(Pool(self, index, kind.name, kind.item_bytes) for index, kind in enumerate(kinds))
        self._free = list(range(self.slabs.num_slabs))
        self._first = self.slabs.scratch_bytes // UNIT_BYTES
        self._slab_units = self.slabs.slab_bytes // UNIT_BYTES
        tail_kind = self.slabs.tail_kind
        if tail := self.slabs.tail_items(tail_kind):
            self._pools[tail_kind].attach(TAIL, self._first + self.slabs.num_slabs * self._slab_units, tail)
        self._capacity = [self.slabs.items_per_slab(kind) for kind in range(len(kinds))]
        self._tail = [self.slabs.tail_items(kind) for kind in range(len(kinds))]
        self.bytes: Tensor = backend.allocate(num_bytes)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pool of every kind, in order."""
        return self._pools

    @property
    def free_slabs(self) -> int:
        """Slabs that no kind has."""
        return len(self._free)

    def pool(self, kind: int) -> Pool:
        """Return the items of the ``kind``-th kind."""
        return self._pools[kind]

    def can_take(self, counts: Mapping[int, int], released: Mapping[int, int] | None = None) -> bool:
        """Return whether so many items of the kinds named can be taken, all of them together.

        Free items, free slabs and what evacuation can empty are counted. ``released``: as if so many more items of a
        kind, none of them pinned, were free.
        """
        left = self.slabs.num_slabs
        for kind, pool in enumerate(self._pools):
            count = pool.used + counts.get(kind, 0)
            if released:
                count -= released.get(kind, 0)
            left -= self._needed(kind, count)
        return left >= 0

    def available(self, kind: int) -> int:
        """Return how many items of a kind can be taken, if none of another is."""
        others = sum(self._needed(each.kind, each.used) for each in self._pools if each.kind != kind)
        slabs = self.slabs.num_slabs - others
        return slabs * self._capacity[kind] + self._tail[kind] - self._pools[kind].used

    def usage(self) -> ArenaUsage:
        """Return where the bytes are now."""
        needed = [self._needed(pool.kind, pool.used) for pool in self._pools]
        slabs_left = self.slabs.num_slabs - sum(needed)
        reachable = slabs_left * max(each * pool.item_bytes for each, pool in zip(self._capacity, self._pools))
        kinds = []
        for pool, slabs, capacity, tail in zip(self._pools, needed, self._capacity, self._tail):
            reachable += (slabs * capacity + tail - pool.used) * pool.item_bytes
            kinds.append(
                KindUsage(
                    name=pool.name,
                    used_bytes=pool.used * pool.item_bytes,
                    free_bytes=pool.free * pool.item_bytes,
                    available_bytes=(slabs_left * capacity + slabs * capacity + tail - pool.used) * pool.item_bytes,
                    rest_bytes=pool.num_slabs * (self.slabs.slab_bytes - capacity * pool.item_bytes),
                )
            )
        tail_kind = self.slabs.tail_kind
        usage = ArenaUsage(
            kinds=tuple(kinds),
            free_slab_bytes=len(self._free) * self.slabs.slab_bytes,
            tail_rest_bytes=self.slabs.tail_bytes - self._tail[tail_kind] * self._pools[tail_kind].item_bytes,
            stranded_bytes=0,
            evacuated_bytes=self.evacuated_bytes,
        )
        return replace(usage, stranded_bytes=usage.unused_bytes - reachable)

    def lend(self, pool: Pool) -> Slab:
        """Give a pool a slab, emptied if need be. Asked by pools."""
        index = heappop(self._free) if self._free else self._evacuate(pool)
        return pool.attach(index, self._first + index * self._slab_units, self._capacity[pool.kind])

    def give_back(self, index: int) -> None:
        """Take an empty slab back. Asked by pools."""
        heappush(self._free, index)

    def _needed(self, kind: int, count: int) -> int:
        """Return how many slabs a kind cannot do without if it has ``count`` items."""
        slabs = -(-(count - self._tail[kind]) // self._capacity[kind])
        pinned = self._pools[kind].pinned_slabs
        return slabs if slabs > pinned else pinned

    def _evacuate(self, asking: Pool) -> int:
        """Empty a slab of another kind, the one with the fewest bytes to move; return its index."""
        found = [(pool, slab) for pool in self._pools if pool is not asking and (slab := pool.lightest()) is not None]
        assert found, f"no slab can be emptied for {asking.name}"
        pool, slab = min(found, key=lambda each: each[1].used * each[0].item_bytes)
        moves: list[Move] = []
        for handle, source, target in pool.evacuate(slab):
            self.moved.append((pool.kind, handle))
            self.evacuated_bytes += pool.item_bytes
            last = moves[-1] if moves else Move(source, target, 0)
            # Neighbours that stay neighbours are one copy: all leave this slab, so that none overlap.
            if (source - last.source) * UNIT_BYTES == (target - last.target) * UNIT_BYTES == last.num_bytes:
                moves[-1:] = [Move(last.source, last.target, last.num_bytes + pool.item_bytes)]
            else:
                moves.append(Move(source, target, pool.item_bytes))
        self.moves += moves
        return slab.index
