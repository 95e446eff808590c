"""The prefix tree: pages of tokens computed before, found again by the tokens at a sequence's beginning.

A radix tree at page granularity. An edge holds a run of whole pages and the bytes of their tokens, so that a lookup
compares memory instead of walking tokens; children are found by the bytes of their first page.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from treadle.runtime.state.pages import PageAllocator

TOKEN_TYPE = "i"
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages after the parent's. ``locks``: sequences that use this node or one below it."""

    key: bytes
    pages: list[int]
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    """tick of the last use; a parent's is never older than its children's"""


class PrefixTree:
    """Holds one reference of every page in it. Pages under no lock are evicted, least recently used first.

    Who wants to go on using pages that ``match`` returned locks their node before anything else is evicted.
    """

    def __init__(self, allocator: PageAllocator, page_tokens: int) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._page_key = page_tokens * TOKEN_BYTES
        self._root = Node(b"", [], None)
        self._tick = 0
        # Leaves without locks by last use; entries are checked when popped, since nodes change under them.
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0
        self._num_nodes = 0
        self.num_pages = 0
        self.evictable = 0
        """pages under no lock: ``evict`` can free as many"""

    def match(self, tokens: array[int]) -> tuple[list[int], Node]:
        """Return the pages that hold the longest known beginning of ``tokens``, and the node where it ends.

        At least the last token is left out, since its logits are wanted. The pages stay the tree's: lock the node.
        """
        limit = max(len(tokens) - 1, 0) // self._page_tokens
        data = tokens[: limit * self._page_tokens].tobytes()
        node, pages = self._descend(data)
        return pages, node

    def insert(self, tokens: array[int], pages: Sequence[int]) -> Node:
        """Remember that ``pages`` hold the beginning of ``tokens``; return the node where they end.

        Where the tree knows the tokens already it keeps its own pages. Shapes: ``tokens`` fill all the pages.
        """
        data = tokens[: len(pages) * self._page_tokens].tobytes()
        assert len(data) == len(pages) * self._page_key, f"{len(tokens)} tokens do not fill {len(pages)} pages"
        node, known = self._descend(data)
        if len(known) == len(pages):
            return node
        key, new = data[len(known) * self._page_key :], list(pages[len(known) :])
        self._allocator.share(new)
        child = Node(key, new, node, used=self._tick)
        node.children[key[: self._page_key]] = child
        self._num_nodes += 1
        self.num_pages += len(new)
        self.evictable += len(new)
        self._offer(child)
        return child

    def lock(self, node: Node) -> None:
        """Keep the pages from the root to ``node``."""
        for each in self._path(node):
            if each.locks == 0:
                self.evictable -= len(each.pages)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        for each in self._path(node):
            assert each.locks > 0, "a node is unlocked more often than locked"
            each.locks -= 1
            if each.locks == 0:
                self.evictable += len(each.pages)
                self._offer(each)

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages, the ends of the least recently used runs first; return how many were freed."""
        freed = 0
        while freed < count and self._heap:
            used, _, node = heapq.heappop(self._heap)
            if node.used == used and self._is_loose(node):
                freed += self._trim(node, count - freed)
        return freed

    def discard(self, node: Node) -> None:
        """Forget ``node`` and those above it that nothing else needs: their content is not to be trusted."""
        while self._is_loose(node):
            parent = node.parent
            assert parent is not None
            self._trim(node, len(node.pages))
            node = parent

    def clear(self) -> int:
        """Evict everything that is not locked; return how many pages that freed."""
        return self.evict(self.num_pages)

    def pages(self) -> Iterator[int]:
        """Yield every page in the tree."""
        for node in self._nodes():
            yield from node.pages

    def force_unlock(self) -> list[int]:
        """Drop every lock and return the pages that were under one; for when all holders are known to be gone."""
        locked = [node for node in self._nodes() if node.locks]
        for node in locked:
            node.locks = 0
            self.evictable += len(node.pages)
            self._offer(node)
        return [page for node in locked for page in node.pages]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _descend(self, data: bytes) -> tuple[Node, list[int]]:
        """Return the node where the longest known beginning of ``data`` ends, split off if need be, and its pages."""
        self._tick += 1
        node, pages, at = self._root, list[int](), 0
        while child := node.children.get(data[at : at + self._page_key]):
            common = self._common_pages(child.key, data, at)
            if common < len(child.pages):
                child = self._split(child, common)
            # Only a leaf can be evicted, and it must look as fresh as its last use when it becomes one.
            child.used = self._tick
            self._offer(child)
            pages += child.pages
            at += len(child.key)
            node = child
        return node, pages

    def _common_pages(self, key: bytes, data: bytes, at: int) -> int:
        """Return how many whole pages ``key`` and ``data`` from ``at`` share; the first page is known to be equal."""
        size = self._page_key
        if data.startswith(key, at):
            return len(key) // size
        low, high = 1, min(len(key), len(data) - at) // size
        view, target = memoryview(key), memoryview(data)
        while low < high:
            middle = (low + high + 1) // 2
            if view[low * size : middle * size] == target[at + low * size : at + middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Cut ``node`` after ``count`` pages; return the new upper part. Locks hold the lower part, so both."""
        assert node.parent is not None
        cut = count * self._page_key
        upper = Node(node.key[:cut], node.pages[:count], node.parent, locks=node.locks, used=node.used)
        node.parent.children[upper.key[: self._page_key]] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[count:], upper
        upper.children[node.key[: self._page_key]] = node
        self._num_nodes += 1
        return upper

    def _trim(self, node: Node, count: int) -> int:
        """Free up to ``count`` pages from the end of a loose node, which leaves the tree when none remain."""
        count = min(count, len(node.pages))
        parent, first = node.parent, node.key[: self._page_key]
        assert parent is not None
        keep = len(node.pages) - count
        self._allocator.release(node.pages[keep:])
        node.pages, node.key = node.pages[:keep], node.key[: keep * self._page_key]
        self.num_pages -= count
        self.evictable -= count
        if keep:
            self._offer(node)
        else:
            del parent.children[first]
            node.parent = None
            self._num_nodes -= 1
            self._offer(parent)
        return count

    def _offer(self, node: Node) -> None:
        """Queue ``node`` for eviction if it can be evicted as it stands."""
        if not self._is_loose(node):
            return
        self._pushes += 1
        heapq.heappush(self._heap, (node.used, self._pushes, node))
        if len(self._heap) > 2 * self._num_nodes + 64:
            fresh = {id(each): (used, push, each) for used, push, each in sorted(self._heap) if each.used == used}
            self._heap = [entry for entry in fresh.values() if self._is_loose(entry[2])]
            heapq.heapify(self._heap)

    @staticmethod
    def _is_loose(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    @staticmethod
    def _path(node: Node) -> Iterator[Node]:
        """Yield ``node`` and those above it, the root excepted."""
        while node.parent is not None:
            yield node
            node = node.parent
