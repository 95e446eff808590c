"""What clients say about their sessions: state that is kept on the device for a while, or that goes first.

A pin is a lease. It ends by itself, when its session comes back, or when somebody who runs, or who would be alone,
lacks memory; so it makes nobody wait for long, and nobody is preempted for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from treadle.runtime.request import HINTS
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.cache import PrefixCache
from treadle.runtime.state.node import Match, Node
from treadle.runtime.state.snapshots import Snapshot

MOST_PINNED = 0.5
"""share of the arena that pins may hold together"""


@dataclass(frozen=True, slots=True)
class _Pin:
    """What is kept, and until when."""

    node: Node
    snapshots: tuple[Snapshot, ...]
    num_bytes: int
    until_s: float


class Sessions:
    """Follows the hints of requests, as far as there is memory. Sessions of other salts are others."""

    def __init__(
        self, cache: PrefixCache, *, page_bytes: int, arena_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``page_bytes``: of a page of the first group."""
        self._cache, self._page_bytes, self._clock = cache, page_bytes, clock
        self._most_bytes = int(arena_bytes * MOST_PINNED)
        self._pins: OrderedDict[Hashable, _Pin] = OrderedDict()
        self.followed = dict.fromkeys(HINTS, 0)
        self.pinned_bytes = 0
        """what several pins share counts for each"""

    def __len__(self) -> int:
        return len(self._pins)

    def ended(self, sequence: Sequence, node: Node | None, snapshot: Snapshot | None) -> None:
        """Follow the hints of a sequence that has left its state in the tree, at ``node`` and in ``snapshot``."""
        session = sequence.session
        if session is None:
            return
        self.returned(sequence)
        if node is None or not self._cache.enabled:
            return
        if session.pin_s:
            self.pin(sequence, node, snapshot)
        elif session.demote:
            self._demote(node)

    def returned(self, sequence: Sequence) -> None:
        """End the pin of a sequence's session: what it needs of that state it now holds itself."""
        key = self._key(sequence)
        if key in self._pins:
            self._release(key)

    def pin(self, sequence: Sequence, node: Node, snapshot: Snapshot | None) -> None:
        """Keep state on the device for as long as a sequence's session asks, unless too much is kept already.

        The next turn goes on from the end of the answer, or from the prompt's, where its template strips thinking.
        """
        assert sequence.session is not None
        inside = (each for above in node.path() for each in above.snapshots if not each.tail)
        prompts = next((each for each in inside if each.position <= sequence.prompt_len), None)
        snapshots = tuple(dict.fromkeys(each for each in (snapshot, prompts) if each is not None))
        num_bytes = node.end * self._page_bytes + sum(map(self._cache.snapshots.bytes_of, snapshots))
        if self.pinned_bytes + num_bytes > self._most_bytes:
            return
        until_s = self._clock() + sequence.session.pin_s
        self._keep(self._key(sequence), _Pin(node, snapshots, num_bytes, until_s))
        self.followed["pin"] += 1

    def poll(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        for key in [key for key, pin in self._pins.items() if pin.until_s <= now]:
            self._release(key)

    def give_way(self) -> bool:
        """End the oldest pin, for somebody who lacks memory; False if there is none."""
        if not self._pins:
            return False
        self._release(next(iter(self._pins)))
        return True

    def arrived(self, sequence: Sequence, match: Match) -> None:
        """Follow the hints of a sequence that was only to be brought near; ``match`` is what is there, locked."""
        self.followed["prefetch"] += 1
        self.returned(sequence)
        if sequence.session is not None and sequence.session.pin_s and match.position:
            self.pin(sequence, match.node, match.snapshot)

    def suspend(self) -> list[tuple[Hashable, _Pin]]:
        """End all pins for a moment; ``resume`` takes what this returns."""
        pins = list(self._pins.items())
        while self.give_way():
            pass
        return pins

    def resume(self, pins: list[tuple[Hashable, _Pin]]) -> None:
        """Undo ``suspend``, nothing having been evicted since."""
        for key, pin in pins:
            self._keep(key, pin)

    def _demote(self, node: Node) -> None:
        """Let what no other conversation uses be evicted first."""
        if node.children or node.parent is None or node.locks:
            return
        while node.parent.parent is not None and len(node.parent.children) == 1 and not node.parent.locks:
            node = node.parent
            assert node.parent is not None
        self._cache.tree.demote(node)
        self.followed["demote"] += 1

    def _keep(self, key: Hashable, pin: _Pin) -> None:
        self._cache.tree.lock(pin.node)
        for snapshot in pin.snapshots:
            self._cache.lock(snapshot)
        self._pins[key] = pin
        self.pinned_bytes += pin.num_bytes

    def _release(self, key: Hashable) -> None:
        pin = self._pins.pop(key)
        self.pinned_bytes -= pin.num_bytes
        self._cache.tree.unlock(pin.node)
        for snapshot in pin.snapshots:
            self._cache.unlock(snapshot)

    def _key(self, sequence: Sequence) -> Hashable:
        return None if sequence.session is None else (self._cache.salt(sequence), sequence.session.id)
