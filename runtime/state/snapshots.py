"""Snapshots: what it takes beside full pages of the first group to go on behind some tokens of the prefix tree.

A *checkpoint* lies at the end of a page, a *tail* in the middle of one. Models whose state is pages of all tokens need
none at a page's end. The bytes in a snapshot never change: who goes on from it gets copies of what it will write to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.runtime.state.pool import Handle, Pool

if TYPE_CHECKING:
    from treadle.runtime.state.node import Node

NEVER = -1
"""the last use of what is to be evicted first"""


@dataclass(eq=False, repr=False, slots=True)
class Snapshot:
    """State behind ``position`` tokens, the last ``tail`` of which fill no page yet."""

    position: int
    tail: bytes
    """the tokens behind the node's last page; empty in a checkpoint"""
    items: tuple[tuple[Handle, ...], ...]
    """handles by kind: the partial page of the first group, pages of each other group's window, the block"""
    born: int
    """the step whose program makes it"""
    sunk: bool = False
    """whether a tier has it too"""
    owner: str = ""
    """the preempted request that will come back to it"""
    node: Node | None = None
    """where its full pages end"""
    used: int = 0
    locks: int = 0


class Snapshots:
    """Every snapshot of a tree, the least recently used first. Holds one reference of every item in them."""

    def __init__(self, pools: Sequence[Pool], item_bytes: Sequence[int], budget_bytes: int | None = None) -> None:
        """``item_bytes``: of each pool's items. Beyond ``budget_bytes`` the least recently used go."""
        self._pools, self._item_bytes, self._budget = pools, item_bytes, budget_bytes
        self._order: OrderedDict[Snapshot, None] = OrderedDict()
        self._locked: set[Snapshot] = set()
        self.num_bytes = 0
        """of all items; what two snapshots share counts twice"""
        self.loose_pages = 0
        """partial pages of the first group in snapshots under no lock"""

    def __len__(self) -> int:
        return len(self._order) + len(self._locked)

    def __iter__(self) -> Iterator[Snapshot]:
        yield from self._order
        yield from self._locked

    def add(self, node: Node, snapshot: Snapshot, tick: int) -> None:
        """Put a snapshot at the end of a node; its references are the caller's gift."""
        snapshot.node, snapshot.used = node, tick
        node.snapshots.append(snapshot)
        self._order[snapshot] = None
        self.loose_pages += len(snapshot.items[0])
        self.num_bytes += self.bytes_of(snapshot)

    def touch(self, snapshot: Snapshot, tick: int) -> None:
        """Note a use."""
        snapshot.used = tick
        if snapshot in self._order:
            self._order.move_to_end(snapshot)

    def demote(self, snapshot: Snapshot) -> None:
        """Make it the next to go."""
        snapshot.used = NEVER
        if snapshot in self._order:
            self._order.move_to_end(snapshot, last=False)

    def lock(self, snapshot: Snapshot) -> None:
        """Keep it until it is unlocked."""
        snapshot.locks += 1
        if snapshot.locks == 1:
            del self._order[snapshot]
            self._locked.add(snapshot)
            self.loose_pages -= len(snapshot.items[0])

    def unlock(self, snapshot: Snapshot) -> None:
        """Undo one ``lock``."""
        assert snapshot.locks > 0, "a snapshot is unlocked more often than locked"
        snapshot.locks -= 1
        if snapshot.locks == 0:
            self._locked.remove(snapshot)
            self._order[snapshot] = None
            self.loose_pages += len(snapshot.items[0])

    def force_unlock(self) -> None:
        """Drop every lock; for when all holders are known to be gone."""
        for snapshot in list(self._locked):
            snapshot.locks = 1
            self.unlock(snapshot)

    @property
    def oldest(self) -> Snapshot | None:
        """The one to go next, None if every one is locked."""
        return next(iter(self._order), None)

    def over_budget(self, more_bytes: int) -> bool:
        """Whether a snapshot of so many bytes more would be too much."""
        return self._budget is not None and self.num_bytes + more_bytes > self._budget

    def bytes_of(self, snapshot: Snapshot) -> int:
        """Return the bytes of its items."""
        return sum(len(handles) * size for handles, size in zip(snapshot.items, self._item_bytes))

    def remove(self, snapshot: Snapshot) -> None:
        """Take it out of its node; its references become the caller's."""
        assert snapshot.node is not None
        snapshot.node.snapshots.remove(snapshot)
        snapshot.node = None
        if snapshot.locks:
            self._locked.remove(snapshot)
        else:
            del self._order[snapshot]
            self.loose_pages -= len(snapshot.items[0])
        self.num_bytes -= self.bytes_of(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget it."""
        self.remove(snapshot)
        for pool, handles in zip(self._pools, snapshot.items):
            pool.release(handles)

    def items(self, kind: int) -> Iterator[int]:
        """Yield the handles of one kind in all snapshots, once for each reference."""
        for snapshot in self:
            yield from snapshot.items[kind]
