"""The host tier: one pool of pinned memory, taken once, that holds sealed objects and evicts the least recently used.

The pool is cut into equal slabs. A slab serves objects of one size; once all in it were used before what another size
would have to evict, they go together and it serves that size. So nothing is fragmented, and no size starves another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treadle.runtime.state.tiers.seal import SEAL_BYTES, write_seal

if TYPE_CHECKING:
    from torch import Tensor

SLABS = 64
"""About as many a pool has, where objects are small enough."""
MAX_EVENTS = 1 << 16
_ALIGN = 256


@dataclass(eq=False, slots=True)
class Slab:
    """A part of the pool. Once no entry is left, it serves any size."""

    offset: int
    item_bytes: int = 0
    free: list[int] = field(default_factory=list)
    """offsets of items that nothing is in"""
    entries: set[Entry] = field(default_factory=set)
    busy: int = 0
    """entries that must stay where they are"""
    newest: int = 0
    """tick of the last use of anything in it"""


@dataclass(eq=False, slots=True)
class Entry:
    """An object's place in the pool: its seal, and its bytes behind that."""

    key: bytes
    num_bytes: int
    offset: int
    slab: Slab
    holds: int = 1
    """uses by copies and by stores; it stays while there is one"""
    used: int = 0
    ready: bool = False
    """whether its bytes are there"""
    sealed: bool = False
    pinned: bool = False
    dropped: bool = False
    """whether it goes with the last hold"""

    @property
    def begin(self) -> int:
        """Where its bytes begin in the pool."""
        return self.offset + SEAL_BYTES


class HostPool:
    """Sealed objects in ``memory`` [bytes] uint8. Safe for several threads; nothing is copied under its lock."""

    def __init__(self, memory: Tensor, sizes: Iterable[int], *, scope: bytes) -> None:
        """``sizes``: bytes of the objects that will be common; others may come too, up to the largest of these."""
        self.memory = memory
        self.view = memoryview(memory.numpy())  # type: ignore[arg-type]
        self._scope = scope
        self.capacity = memory.numel()
        largest = max((_item_bytes(size) for size in sizes), default=_ALIGN)
        count = max(1, min(SLABS, self.capacity // largest))
        # Whole items of the largest size, so that it wastes nothing.
        self.slab_bytes = self.capacity // count // largest * largest
        count = self.capacity // self.slab_bytes if self.slab_bytes else 0
        self._empty = [Slab(index * self.slab_bytes) for index in reversed(range(count))]
        self._slabs: dict[int, list[Slab]] = {}
        self._idle: dict[int, OrderedDict[Entry, None]] = {}
        self._entries: dict[bytes, Entry] = {}
        self._lock = threading.Lock()
        self._tick = 0
        self._events: deque[tuple[str, bytes]] = deque(maxlen=MAX_EVENTS)
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ready

    def keys(self) -> list[bytes]:
        """Return the keys of all objects, at one moment."""
        with self._lock:
            return list(self._entries)

    def is_placed(self, key: bytes) -> bool:
        """Whether a key has a place, ready or not."""
        return key in self._entries

    def reserve(self, key: bytes, num_bytes: int) -> Entry | None:
        """Return a place for an object, held and not yet ready; None if there is no room or the key has a place."""
        with self._lock:
            if key in self._entries:
                return None
            place = self._place(_item_bytes(num_bytes))
            if place is None:
                return None
            slab, offset = place
            entry = Entry(key, num_bytes, offset, slab)
            slab.entries.add(entry)
            slab.busy += 1
            self._entries[key] = entry
            self.used_bytes += slab.item_bytes
            self._touch(entry)
            return entry

    def commit(self, entry: Entry, *, sealed: bool = False) -> None:
        """Say that the bytes of a reserved place are there, its seal too if ``sealed``; the hold stays."""
        with self._lock:
            entry.ready, entry.sealed = True, sealed
            self._events.append(("stored", entry.key))

    def acquire(self, key: bytes, num_bytes: int | None = None) -> Entry | None:
        """Return the entry of a ready object, held and just used; None if there is none (of this length, if given)."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.ready or num_bytes not in (None, entry.num_bytes):
                return None
            if entry.holds == 0 and not entry.pinned:
                self._wake(entry)
            entry.holds += 1
            self._touch(entry)
            return entry

    def release(self, *entries: Entry) -> None:
        """Undo one hold of each; a place that was never filled, or dropped, is free with the last one."""
        with self._lock:
            for entry in entries:
                assert entry.holds > 0, "an entry is released more often than held"
                entry.holds -= 1
                self._settle(entry)

    def drop(self, key: bytes) -> None:
        """Forget an object, as soon as nobody uses it; until then ``reserve`` finds its key free."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.ready:
                del self._entries[key]
                entry.dropped = True
                self._events.append(("removed", key))
                if entry.pinned:
                    entry.pinned = False
                    self.pinned_bytes -= entry.slab.item_bytes
                elif entry.holds == 0:
                    self._wake(entry)
                self._settle(entry)

    def forget(self, entry: Entry) -> None:
        """Free the key of a reserved place that will not be filled; the place is free with the last hold."""
        with self._lock:
            assert not entry.ready, "a ready entry is dropped by its key"
            if not entry.dropped:
                del self._entries[entry.key]
                entry.dropped = True

    def demote(self, key: bytes) -> None:
        """Make an object the first to be evicted."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry in self._idle.get(entry.slab.item_bytes, ()):
                entry.used = 0
                self._idle[entry.slab.item_bytes].move_to_end(entry, last=False)

    def pin(self, key: bytes, pinned: bool, *, limit: int) -> bool:
        """Keep an object from eviction, or no longer; whether that was done: it is here, and no more than ``limit``
        bytes are pinned then."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.ready:
                return False
            size = entry.slab.item_bytes
            if pinned == entry.pinned:
                return True
            if not pinned:
                entry.pinned = False
                self.pinned_bytes -= size
                self._settle(entry)
                return True
            if self.pinned_bytes + size > limit:
                return False
            if entry.holds == 0:
                self._wake(entry)
            entry.pinned = True
            self.pinned_bytes += size
            return True

    def sealed(self, entry: Entry) -> memoryview:
        """Return seal and bytes of a held, ready entry, sealed first if it is not yet."""
        whole = self.room(entry)
        if not entry.sealed:
            # Two threads may do this at once; they write the same bytes.
            write_seal(whole[:SEAL_BYTES], whole[SEAL_BYTES:], key=entry.key, scope=self._scope)
            entry.sealed = True
        return whole

    def room(self, entry: Entry) -> memoryview:
        """Return where seal and bytes of a held entry go."""
        return self.view[entry.offset : entry.begin + entry.num_bytes]

    def events(self) -> list[tuple[str, bytes]]:
        """Return what was stored and removed since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def _place(self, item: int) -> tuple[Slab, int] | None:
        """Return a slab and an offset in it for an item, evicting what was used before anything that stays."""
        if item > self.slab_bytes:
            return None
        slabs = self._slabs.setdefault(item, [])
        slab = next((each for each in slabs if each.free), None)
        if slab is None and self._empty:
            slab = self._give(self._empty.pop(), item)
        if slab is None:
            slab = self._evict(item)
        return None if slab is None else (slab, slab.free.pop())

    def _evict(self, item: int) -> Slab | None:
        """Return a slab of ``item`` bytes that has room now; None if everything is in use."""
        own = next(iter(self._idle.get(item, ())), None)
        others = (each for size, slabs in self._slabs.items() if size != item for each in slabs if not each.busy)
        oldest = min(others, key=lambda slab: slab.newest, default=None)
        if own is not None and (oldest is None or own.used <= oldest.newest):
            slab = own.slab
            slabs = len(self._empty)
            self._remove(own)
            # Its last entry: the slab was given back, and is taken again.
            return self._give(self._empty.pop(), item) if len(self._empty) > slabs else slab
        if oldest is None:
            return None
        for entry in list(oldest.entries):
            self._remove(entry)
        return self._give(self._empty.pop(), item)

    def _remove(self, entry: Entry) -> None:
        """Evict an idle entry."""
        del self._entries[entry.key]
        self._wake(entry)
        self.evictions += 1
        self._events.append(("removed", entry.key))
        self._free(entry)

    def _give(self, slab: Slab, item: int) -> Slab:
        slab.item_bytes, slab.newest = item, 0
        slab.free = [slab.offset + index * item for index in reversed(range(self.slab_bytes // item))]
        self._slabs[item].append(slab)
        return slab

    def _free(self, entry: Entry) -> None:
        """Take a busy entry out of its slab, which serves any size again if it was the last."""
        slab = entry.slab
        slab.entries.remove(entry)
        slab.busy -= 1
        slab.free.append(entry.offset)
        self.used_bytes -= slab.item_bytes
        if not slab.entries:
            self._slabs[slab.item_bytes].remove(slab)
            self._empty.append(slab)

    def _wake(self, entry: Entry) -> None:
        """Keep an idle entry where it is."""
        del self._idle[entry.slab.item_bytes][entry]
        entry.slab.busy += 1

    def _settle(self, entry: Entry) -> None:
        """Let an entry that nobody holds go, or wait for eviction."""
        if entry.holds or entry.pinned:
            return
        if entry.dropped:
            self._free(entry)
        elif not entry.ready:
            del self._entries[entry.key]
            self._free(entry)
        else:
            entry.slab.busy -= 1
            self._touch(entry)
            self._idle.setdefault(entry.slab.item_bytes, OrderedDict())[entry] = None

    def _touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.used = entry.slab.newest = self._tick


def _item_bytes(num_bytes: int) -> int:
    """Return what an object of ``num_bytes`` takes of the pool, its seal included."""
    return SEAL_BYTES + -(-num_bytes // _ALIGN) * _ALIGN
