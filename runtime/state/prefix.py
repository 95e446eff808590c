"""The prefix tree: pages of tokens computed before, found again by the tokens at a sequence's beginning.

A radix tree at page granularity. An edge holds a run of whole pages and the bytes of their tokens, so that a lookup
compares memory instead of walking tokens; children are found by the bytes of their first page. Tenants with different
salts have roots of their own and share nothing.

Where pages of the first group are not all the state there is, one can go on behind known tokens only where a snapshot
was kept; pages that no snapshot follows are worth little and go first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence

from treadle.runtime.state.digest import chain, seed
from treadle.runtime.state.node import TOKEN_BYTES, Match, Node
from treadle.runtime.state.pool import Pool
from treadle.runtime.state.snapshots import NEVER, Snapshot, Snapshots


class PrefixTree:
    """Holds one reference of every page in it. Pages under no lock are evicted, least recently used first.

    Who wants to go on using pages that ``match`` returned locks their node before anything else is evicted.
    """

    def __init__(self, pool: Pool, page_tokens: int, snapshots: Snapshots, *, needs_snapshots: bool = False) -> None:
        self._pool = pool
        self.dropped: Callable[[Snapshot], None] = lambda _: None
        """told of every snapshot that is about to be evicted"""
        self._released: list[Callable[[Node, int], None]] = []
        self.snapshots = snapshots
        self._needs_snapshots = needs_snapshots
        self._page_tokens = page_tokens
        self._page_key = page_tokens * TOKEN_BYTES
        self._roots: dict[Hashable, Node] = {}
        self._tick = 0
        # Leaves without locks by last use; entries are checked when popped, since nodes change under them.
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0
        self._num_nodes = 0
        self.num_pages = 0
        self.evictable = 0
        """pages under no lock: ``evict`` can free as many"""

    def root(self, salt: Hashable) -> Node:
        """Return where all begins that has this salt."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) > self._num_nodes + 64:
                self._roots = {name: each for name, each in self._roots.items() if each.children or each.snapshots}
            root = self._roots[salt] = Node(b"", [], None, digests=[seed(salt)])
        return root

    def digests(self, node: Node) -> list[bytes]:
        """Return the digest of all tokens up to the end of each of a node's pages; of a root, that of no tokens."""
        path = [node]
        while path[-1].digests is None:
            assert path[-1].parent is not None
            path.append(path[-1].parent)
        for upper, lower in zip(path[::-1], path[-2::-1]):
            assert upper.digests is not None
            lower.digests = chain(upper.digests[-1], lower.key, self._page_key)
        assert node.digests is not None
        return node.digests

    def find(self, tokens: array[int], count: int, salt: Hashable) -> Node | None:
        """Return the node where the first ``count`` pages of ``tokens`` end, None if they are not all there."""
        node, pages = self._descend(tokens[: count * self._page_tokens].tobytes(), self.root(salt))
        return node if len(pages) == count else None

    def match(self, tokens: array[int], salt: Hashable = None, now: int | None = None) -> Match:
        """Return the longest known beginning of ``tokens``. Its pages stay the tree's: lock the node.

        At least the last token is left out, since its logits are wanted. Snapshots born in step ``now`` are not there
        yet.
        """
        most = max(len(tokens) - 1, 0)
        data = tokens[:most].tobytes()
        deepest, pages = self._descend(data, self.root(salt))
        match = Match(deepest, pages, 0, None, len(pages) * self._page_tokens, deepest)
        node = deepest
        while True:
            for snapshot in node.snapshots:
                self._consider(match, snapshot, node, data, now)
            if match.snapshot is not None or node.parent is None or not self._needs_snapshots:
                break
            node = node.parent
        if not self._needs_snapshots and match.position < match.known:
            match.node, match.position, match.snapshot = deepest, match.known, None
        if match.snapshot is not None:
            self.snapshots.touch(match.snapshot, self._tick)
        match.pages = pages[: match.node.end]
        if match.snapshot is None and self._needs_snapshots:
            match.node, match.pages = self.root(salt), []
        return match

    def _consider(self, match: Match, snapshot: Snapshot, node: Node, data: bytes, now: int | None) -> None:
        """Take a snapshot for the match if it is one of these tokens, and further on."""
        if snapshot.position <= max(match.position, match.later):
            return
        begin = node.end * self._page_key
        if data[begin : begin + len(snapshot.tail)] != snapshot.tail:
            return
        if snapshot.born == now:
            match.later = snapshot.position
        else:
            match.node, match.position, match.snapshot = node, snapshot.position, snapshot

    def insert(self, tokens: array[int], pages: Sequence[int], salt: Hashable = None) -> Node:
        """Remember that ``pages`` hold the beginning of ``tokens``; return the node where they end.

        Where the tree knows the tokens already it keeps its own pages. Shapes: ``tokens`` fill all the pages.
        """
        data = tokens[: len(pages) * self._page_tokens].tobytes()
        assert len(data) == len(pages) * self._page_key, f"{len(tokens)} tokens do not fill {len(pages)} pages"
        node, known = self._descend(data, self.root(salt))
        if len(known) == len(pages):
            return node
        key, new = data[len(known) * self._page_key :], list(pages[len(known) :])
        self._pool.share(new)
        child = Node(key, new, node, start=node.end, used=self._tick)
        node.children[key[: self._page_key]] = child
        self._num_nodes += 1
        self.num_pages += len(new)
        self.evictable += len(new)
        self._offer(child)
        return child

    def lock(self, node: Node) -> None:
        """Keep the pages from the root to ``node``."""
        for each in node.path():
            if each.locks == 0:
                self.evictable -= len(each.pages)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        for each in node.path():
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

    def on_release(self, tell: Callable[[Node, int], None]) -> None:
        """Let somebody know when all but the first pages of a node are about to leave the tree, and how many stay."""
        self._released.append(tell)

    def known_elsewhere(self, data: bytes, node: Node) -> int:
        """Return how many pages of ``data`` are known under another salt than ``node`` is, the most of any."""
        own, most = node.root, 0
        for root in self._roots.values():
            if root is own or data[: self._page_key] not in root.children:
                continue
            at, node = 0, root
            while child := node.children.get(data[at : at + self._page_key]):
                common = self._common_pages(child.key, data, at)
                at += common * self._page_key
                if common < len(child.pages):
                    break
                node = child
            most = max(most, at // self._page_key)
        return most

    @property
    def oldest(self) -> int | None:
        """Tick of the last use of the run that would be evicted next, None if there is none."""
        while self._heap:
            used, _, node = self._heap[0]
            if node.used == used and self._is_loose(node):
                return used
            heapq.heappop(self._heap)
        return None

    def keep(self, node: Node, snapshot: Snapshot) -> None:
        """Put a snapshot at the end of a node, whose pages are worth something from now on."""
        self.snapshots.add(node, snapshot, self._tick)
        node.used = self._tick
        self._offer(node)

    def evict_next(self, num_pages: int) -> bool:
        """Evict what was not used for longest, a snapshot or up to ``num_pages``; False if there is nothing."""
        pages, snapshot = self.oldest, self.snapshots.oldest
        if snapshot is not None and (pages is None or snapshot.used <= pages):
            self.drop(snapshot)
            return True
        return self.evict(max(num_pages, 1)) > 0

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Pages that led only to it are worth little then."""
        node = snapshot.node
        self.dropped(snapshot)
        self.snapshots.drop(snapshot)
        if node is not None:
            self._offer(node)

    def demote(self, node: Node) -> None:
        """Let all from ``node`` on be evicted first."""
        for each in node.below():
            each.used = NEVER
            for snapshot in each.snapshots:
                self.snapshots.demote(snapshot)
            self._offer(each)

    def discard(self, node: Node) -> None:
        """Forget ``node`` and those above it that nothing else needs: their content is not to be trusted."""
        while self._is_loose(node):
            parent = node.parent
            assert parent is not None
            self._trim(node, len(node.pages))
            node = parent

    def forget(self, salt: Hashable) -> None:
        """Drop all with this salt that is under no lock."""
        root = self._roots.get(salt)
        if root is None:
            return
        for snapshot in [each for each in root.snapshots if not each.locks]:
            self.snapshots.drop(snapshot)
        for node in list(root.below())[:0:-1]:
            if self._is_loose(node):
                self._trim(node, len(node.pages))
        if not root.children and not root.snapshots:
            del self._roots[salt]

    def clear(self) -> int:
        """Evict everything that is not locked; return how many pages of the tree that freed."""
        while (snapshot := self.snapshots.oldest) is not None:
            self.snapshots.drop(snapshot)
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
        for root in self._roots.values():
            for child in root.children.values():
                yield from child.below()

    def _descend(self, data: bytes, node: Node) -> tuple[Node, list[int]]:
        """Return the node where the longest known beginning of ``data`` ends, split off if need be, and its pages."""
        self._tick += 1
        pages, at, size, tick = list[int](), 0, self._page_key, self._tick
        while child := node.children.get(data[at : at + size]):
            if not data.startswith(child.key, at):
                child = self._split(child, self._common_pages(child.key, data, at))
            # Only a leaf can be evicted, and it must look as fresh as its last use when it becomes one.
            child.used = tick
            pages += child.pages
            at += len(child.key)
            node = child
        self._offer(node)
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
        upper = Node(
            node.key[:cut], node.pages[:count], node.parent, start=node.start, locks=node.locks, used=node.used
        )
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:count], node.digests[count:]
        node.start += count
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
        for snapshot in list(node.snapshots):
            self.dropped(snapshot)
            self.snapshots.drop(snapshot)
        keep = len(node.pages) - count
        for tell in self._released:
            tell(node, keep)
        self._pool.release(node.pages[keep:])
        if node.digests is not None:
            del node.digests[keep:]
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
        if self._needs_snapshots and not node.snapshots:
            node.used = NEVER
        self._pushes += 1
        heapq.heappush(self._heap, (node.used, self._pushes, node))
        if len(self._heap) > 2 * self._num_nodes + 64:
            fresh = {id(each): (used, push, each) for used, push, each in sorted(self._heap) if each.used == used}
            self._heap = [entry for entry in fresh.values() if self._is_loose(entry[2])]
            heapq.heapify(self._heap)

    @staticmethod
    def _is_loose(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None
