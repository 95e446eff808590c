"""Whether there is room in the arena, and how to make it by evicting what is kept for later."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

from treadle.graph.state import State
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.holders import Holders
from treadle.runtime.state.node import Match
from treadle.runtime.state.prefix import PrefixTree

CALM_PAGES = 8
"""pages that every running sequence must be able to grow by before a preempted one comes back: hysteresis"""

Counts = dict[int, int]
"""items by kind: groups of pages in order, then the block"""


class Others(NamedTuple):
    """Who wants room beside a newcomer."""

    running: Ordered[Sequence]
    ahead: Ordered[Sequence] = ()
    """those that it passes in the queue, and that will come in before it"""


class Room:
    """Counts what sequences may need of every kind of state."""

    def __init__(
        self, arena: Arena, state: State, tree: PrefixTree, holders: dict[int, Holders], max_step_tokens: int
    ) -> None:
        """``holders``: of every kind but the first, for which the tree knows what can be evicted."""
        self._arena, self._state, self._tree, self._holders = arena, state, tree, holders
        self._page_tokens = state.page_tokens
        self._max_step_tokens = max_step_tokens
        self._windows = range(1, len(state.groups))
        self._block = len(state.groups) if state.block is not None else None

    @property
    def evictable_pages(self) -> int:
        """Pages of the first group that only the tree holds, and that it can give up."""
        return self._tree.evictable + self._tree.snapshots.loose_pages

    def evictable(self, kind: int) -> int:
        """Return how many items of a kind only the tree holds."""
        return self.evictable_pages if kind == 0 else self._holders[kind].evictable

    def fits(self, need: Counts, beside: Counts | None = None) -> bool:
        """Whether items can be had, and others ``beside`` them, if need be by evicting."""
        counts = dict(need)
        for kind, count in (beside or {}).items():
            counts[kind] = counts.get(kind, 0) + count
        released = {kind: holders.evictable for kind, holders in self._holders.items()}
        released[0] = self.evictable_pages
        return self._arena.can_take(counts, released)

    def make(self, need: Counts) -> bool:
        """Evict until items can be taken; False if that does not help."""
        while not self._arena.can_take(need):
            if not self._tree.evict_next(need.get(0, 0) - self._arena.available(0)):
                return False
        return True

    def longest(self, max_len: int) -> int:
        """Return how many tokens a sequence can have that is alone, at most ``max_len``."""
        used = {pool.kind: pool.used for pool in self._arena.pools}
        low, high = 0, max_len
        while low < high:
            middle = (low + high + 1) // 2
            counts = {0: self.pages_for(middle)} | {group: self.span(group, middle, True) for group in self._windows}
            if self._block is not None:
                counts[self._block] = 1
            low, high = (middle, high) if self._arena.can_take(counts, used) else (low, middle - 1)
        return low

    def beside(self, newcomer: Sequence, others: Others) -> Counts:
        """Return what must stay available beside ``newcomer``'s, so that it does not push others out."""
        running, ahead = others
        if not running and not ahead:
            return {}
        size = self._page_tokens
        # Those ahead must still find the room that they wait for.
        calm = CALM_PAGES if any(each.preemptions for each in (newcomer, *ahead)) else 1
        grow = (*running, *ahead, newcomer)
        room = {0: sum(min(calm, -(-each.remaining // size)) for each in grow if each.remaining > 0)}
        for group in self._windows:
            room[group] = sum(
                max(
                    self.span(group, each.prompt_len + each.max_tokens, each.prefilling)
                    - len(each.windows[group - 1].pages),
                    0,
                )
                for each in running
            )
        for each in ahead:
            for kind, count in self.whole(each).items():
                room[kind] = room.get(kind, 0) + max(count - each.wait.coming.get(kind, 0), 0)
        return room

    def needs(self, sequence: Sequence, match: Match, takes: bool) -> Counts:
        """Return the items that a sequence needs when it comes in, its first chunk's included.

        ``takes``: what is in the snapshot is its own; else it shares whole pages and gets copies of the rest.
        """
        snapshot, rest = match.snapshot, match.position % self._page_tokens > 0
        need = {0: self.pages_for(len(sequence.tokens)) - len(match.pages) - (rest and takes)}
        for group in self._windows:
            has = 0 if snapshot is None else len(snapshot.items[group]) - (rest and not takes)
            need[group] = max(self.span(group, len(sequence.tokens), True) - has, 0)
        if self._block is not None:
            need[self._block] = int(not takes)
        return need

    def whole(self, sequence: Sequence) -> Counts:
        """Return what a sequence takes when it comes in and nothing is known of it."""
        num_tokens = len(sequence.tokens)
        need = {0: self.pages_for(num_tokens)} | {group: self.span(group, num_tokens, True) for group in self._windows}
        return need if self._block is None else need | {self._block: 1}

    def span(self, group: int, num_tokens: int, chunks: bool) -> int:
        """Return the most pages of a windowed group that a sequence of so many tokens has at once.

        ``chunks``: a step may advance it by more than a token.
        """
        kv = self._state.groups[group]
        reach = min(each for each in (kv.window, kv.chunk) if each)
        step = min(self._max_step_tokens, num_tokens) if chunks else 1
        return min(self.pages_for(num_tokens), self.pages_for(reach + step) + 1)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-num_tokens // self._page_tokens)
