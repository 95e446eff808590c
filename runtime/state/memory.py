"""State memory: what sequences hold of the arena, and what is kept of them for others. Host only, no tensors.

The scheduler asks: who may come in, who may grow, what is given back. It knows no page itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from treadle.runtime.sequence import Sequence
from treadle.runtime.state.pages import PageAllocator
from treadle.runtime.state.prefix import PrefixTree

CALM_PAGES = 8
"""pages that every running sequence must be able to grow by before a preempted one comes back: hysteresis"""


class StateMemory:
    """Owns the pages and the prefix tree. Memory for sequences is taken from the tree where nothing is free."""

    def __init__(self, allocator: PageAllocator, *, page_tokens: int, prefix_cache: bool) -> None:
        self.allocator = allocator
        self.tree = PrefixTree(allocator, page_tokens)
        self._page_tokens = page_tokens
        self._prefix_cache = prefix_cache

    @property
    def pages_held(self) -> int:
        """Pages that sequences use; the rest is free or could be evicted at once."""
        return self.allocator.total - self._available

    def admit(self, sequence: Sequence, running: Ordered[Sequence]) -> bool:
        """Give a sequence the pages of all its known tokens, if that leaves those that run room to breathe.

        ``sequence.computed`` is then what the prefix tree knew of them.
        """
        cached: list[int] = []
        if self._prefix_cache:
            cached, node = self.tree.match(sequence.readable)
            self.tree.lock(node)
            sequence.node = node
        need = -(-len(sequence.tokens) // self._page_tokens) - len(cached)
        if need + self._headroom(sequence, running) > self._available:
            self._unlock(sequence)
            return False
        self.allocator.share(cached)
        sequence.pages = cached + self._take(need, sequence)
        sequence.computed = len(cached) * self._page_tokens
        return True

    def fork(self, leader: Sequence, sequence: Sequence, running: Ordered[Sequence]) -> list[tuple[int, int]] | None:
        """Let a sequence begin at the end of its leader's prompt: it shares full pages and gets a copy of the last.

        Returns the pages to copy, from and to; None if there is no room.
        """
        full, rest = divmod(leader.prompt_len, self._page_tokens)
        if bool(rest) + self._headroom(sequence, running) > self._available:
            return None
        if leader.node is not None:
            self.tree.lock(leader.node)
            sequence.node = leader.node
        self.allocator.share(leader.pages[:full])
        sequence.pages = leader.pages[:full] + self._take(bool(rest), sequence)
        return [(leader.pages[full], sequence.pages[full])] if rest else []

    def is_full(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence needs a page."""
        return sequence.computed == len(sequence.pages) * self._page_tokens

    def grow(self, sequence: Sequence) -> int | None:
        """Give a sequence its next page and return it; None if there is none."""
        if self._available == 0:
            return None
        (page,) = self._take(1, sequence)
        sequence.pages.append(page)
        return page

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the prefix tree share the full pages among the first ``num_tokens`` tokens."""
        count = num_tokens // self._page_tokens
        if not self._prefix_cache or count == 0:
            return
        node = self.tree.insert(sequence.tokens, sequence.pages[:count])
        self.tree.lock(node)
        self._unlock(sequence)
        sequence.node = node

    def vacate(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds. The tree keeps what is valid for as long as it is not needed."""
        self.remember(sequence, sequence.num_valid)
        self._give_back(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds; its content is bad and leaves the tree."""
        node = sequence.node
        self._give_back(sequence)
        if node is not None:
            self.tree.discard(node)

    def heal(self) -> dict[str, int]:
        """While nothing runs, give back pages that somebody forgot; return who had taken how many.

        All that may be left then is the tree's own reference of each of its pages, under no lock.
        """
        leaked: dict[str, int] = {}
        if self.tree.evictable != self.tree.num_pages:
            for page in self.tree.force_unlock():
                leaked[self.allocator.owner(page)] = leaked.get(self.allocator.owner(page), 0) + 1
        if self.allocator.num_refs != self.tree.num_pages:
            for owner, count in self.allocator.reclaim(self.tree.pages()).items():
                leaked[owner] = leaked.get(owner, 0) + count
        return leaked

    @property
    def _available(self) -> int:
        return self.allocator.free + self.tree.evictable

    def _headroom(self, newcomer: Sequence, running: Ordered[Sequence]) -> int:
        """Return the pages that must stay available beside ``newcomer``'s, so that it does not push others out."""
        if not running:
            return 0
        calm = CALM_PAGES if newcomer.preemptions else 1
        return sum(
            min(calm, -(-each.remaining // self._page_tokens)) for each in (*running, newcomer) if each.remaining > 0
        )

    def _take(self, count: int, sequence: Sequence) -> list[int]:
        self.tree.evict(count - self.allocator.free)
        return self.allocator.take(count, sequence.id)

    def _give_back(self, sequence: Sequence) -> None:
        self._unlock(sequence)
        self.allocator.release(sequence.pages)
        sequence.pages = []

    def _unlock(self, sequence: Sequence) -> None:
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
            sequence.node = None
