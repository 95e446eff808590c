"""State on its way out of the device: what sequences leave is copied to the tiers at once, so that evicting it is free.

Nothing is read before the steps that write it are launched, and what is read stays where it is until that is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from treadle.runtime.state.arena import Arena
from treadle.runtime.state.cache import PrefixCache
from treadle.runtime.state.node import Node
from treadle.runtime.state.pool import Handle
from treadle.runtime.state.snapshots import Snapshot
from treadle.runtime.state.tiers.ticket import Object, Ticket
from treadle.runtime.state.tiers.tiers import Tiers

MOST_KNOWN = 1 << 16
"""Pages behind which the tails that tiers have are remembered."""
MOST_TAILS = 64
"""Tails behind one page, the latest: all short prompts are behind none, and each is tried for a new one."""


@dataclass
class _Job:
    """A transfer under way."""

    node: Node
    snapshot: Snapshot | None
    items: list[tuple[int, Handle]] = field(default_factory=list)
    ticket: Ticket | None = None


class Sinker:
    """Copies pages of the tree, and snapshots, to the tiers."""

    def __init__(self, arena: Arena, cache: PrefixCache, tiers: Tiers, flight_bytes: int) -> None:
        """At most about ``flight_bytes`` are on their way at a time."""
        self._arena, self._cache, self._tiers, self._flight_bytes = arena, cache, tiers, flight_bytes
        # Node, snapshot, whether they are locked since they were offered, and the first page that was not sent yet.
        self._queue: deque[tuple[Node, Snapshot | None, bool, int]] = deque()
        self._jobs: list[_Job] = []
        self._bytes = 0
        self._sunk: set[Handle] = set()
        self.tails: dict[bytes, dict[bytes, None]] = {}
        """tails of snapshots that tiers were given, by the digest of the page before them; the latest last"""
        self.promised = 0
        """pages that can be evicted once they have arrived"""
        cache.tree.on_release(lambda node, keep: self._sunk.difference_update(node.pages[keep:]))

    @property
    def busy(self) -> bool:
        """Whether anything waits, or is on its way."""
        return bool(self._queue or self._jobs)

    @property
    def _limit(self) -> int:
        return min(self._flight_bytes, self._tiers.pace.num_bytes)

    def offer(self, node: Node, snapshot: Snapshot | None, *, urgent: bool = False) -> None:
        """Queue the pages up to a node's end, and a snapshot there. What is ``urgent`` is not evicted before."""
        if not urgent:
            self._queue.append((node, snapshot, False, 0))
            return
        self._lock(node, snapshot)
        self._queue.appendleft((node, snapshot, True, 0))

    def _lock(self, node: Node, snapshot: Snapshot | None) -> None:
        self._cache.tree.lock(node)
        self.promised += node.end
        if snapshot is not None:
            self._cache.lock(snapshot)

    def _unlock(self, node: Node, snapshot: Snapshot | None) -> None:
        self._cache.tree.unlock(node)
        self.promised -= node.end
        if snapshot is not None:
            self._cache.unlock(snapshot)

    def note_sunk(self, pages: list[Handle]) -> None:
        """Note pages of the tree that came from a tier."""
        self._sunk.update(pages)

    def poll(self) -> None:
        """Take outcomes, and begin what there is room for. Before a step is planned."""
        for job in [job for job in self._jobs if job.ticket is not None and job.ticket.done]:
            self._jobs.remove(job)
            self._finish(job)
        while self._queue and self._bytes < self._limit:
            node, snapshot, locked, first = self._queue.popleft()
            if snapshot is not None and snapshot.node is None:
                snapshot = None
            if node.parent is not None or snapshot is not None:
                rest = self._begin(node, snapshot, first)
                if rest is not None:
                    self._queue.appendleft((node, snapshot, locked, rest))
                    break
            if locked:
                self._unlock(node, snapshot)

    def _begin(self, node: Node, snapshot: Snapshot | None, first: int) -> int | None:
        """Send what no tier has yet, from page ``first`` on; return where to go on later if that is not all."""
        job, objects = _Job(node, None if snapshot is None or snapshot.sunk else snapshot), list[Object]()
        rest, room = None, self._limit - self._bytes
        for kind, handle, key, page in self._items(job, first):
            pool = self._arena.pool(kind)
            if room < pool.item_bytes and page is not None and objects:
                job.snapshot, rest = None, page
                break
            room -= pool.item_bytes
            objects.append(Object(key, "page" if kind == 0 else "checkpoint", pool.offset(handle), pool.item_bytes))
            job.items.append((kind, handle))
        if not objects:
            return None
        self._lock(node, job.snapshot)
        for kind, handle in job.items:
            self._arena.pool(kind).pin([handle])
            self._bytes += self._arena.pool(kind).item_bytes
        job.ticket = self._tiers.sink(objects)
        self._jobs.append(job)
        return rest

    def _items(self, job: _Job, first: int) -> Iterator[tuple[int, Handle, bytes, int | None]]:
        """Yield what is to be sunk: pages from ``first`` on, then the snapshot; kind, handle, key, number of a page."""
        tree = self._cache.tree
        for node in reversed([*job.node.path()]):
            if node.end <= first:
                continue
            digests = tree.digests(node)
            for index in range(max(first - node.start, 0), len(node.pages)):
                if (page := node.pages[index]) not in self._sunk:
                    yield 0, page, digests[index], node.start + index
        if job.snapshot is not None:
            digests = [each for node in reversed([*job.node.path()]) for each in tree.digests(node)]
            origin = tree.digests(job.node.root)
            keys = self._cache.snapshot_keys(job.snapshot.position, job.snapshot.tail, [*origin, *digests])
            for kind, (handles, names) in enumerate(zip(job.snapshot.items, keys)):
                for handle, key in zip(handles, names, strict=True):
                    yield kind, handle, key, None

    def _finish(self, job: _Job) -> None:
        assert job.ticket is not None
        for (kind, handle), ok in zip(job.items, job.ticket.ok):
            pool = self._arena.pool(kind)
            pool.unpin([handle])
            self._bytes -= pool.item_bytes
            if ok and kind == 0 and (job.snapshot is None or handle not in job.snapshot.items[0]):
                self._sunk.add(handle)
        if job.snapshot is not None:
            job.snapshot.sunk = all(job.ticket.ok)
            if job.snapshot.sunk and job.snapshot.tail:
                self._note_tail(self._cache.tree.digests(job.node)[-1], job.snapshot.tail)
        self._unlock(job.node, job.snapshot)

    def _note_tail(self, digest: bytes, tail: bytes) -> None:
        if digest not in self.tails and len(self.tails) >= MOST_KNOWN:
            del self.tails[next(iter(self.tails))]
        behind = self.tails.setdefault(digest, {})
        behind.pop(tail, None)
        if len(behind) >= MOST_TAILS:
            del behind[next(iter(behind))]
        behind[tail] = None
