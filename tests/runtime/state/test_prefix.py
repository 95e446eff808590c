from __future__ import annotations

import time
from array import array

from arenas import make_arena
from history_model import RECURRENT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from treadle.graph.state import LayerKV, PagedKV, State
from treadle.runtime.state.node import TOKEN_TYPE, Node
from treadle.runtime.state.pool import Pool
from treadle.runtime.state.prefix import PrefixTree
from treadle.runtime.state.snapshots import Snapshot, Snapshots

PAGE = 4


def make_tree(num_pages: int, page_tokens: int = PAGE) -> tuple[Pool, PrefixTree]:
    kv = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=8, v_dim=8),), dtype="float32", page_tokens=page_tokens)
    arena = make_arena(State(groups=(kv,)), {0: num_pages})
    pool = arena.pool(0)
    return pool, PrefixTree(pool, page_tokens, Snapshots(arena.pools, [kv.page_bytes]))


def remember(allocator: Pool, tree: PrefixTree, tokens: list[int]) -> list[int]:
    """Insert as a finished sequence does, and return its pages."""
    pages = allocator.take(len(tokens) // PAGE, "test")
    tree.insert(array(TOKEN_TYPE, tokens), pages)
    allocator.release(pages)
    return pages


def found(tree: PrefixTree, tokens: list[int]) -> list[int]:
    return tree.match(array(TOKEN_TYPE, tokens)).pages


def test_match_finds_whole_pages_and_leaves_the_last_token() -> None:
    allocator, tree = make_tree(16)
    tokens = list(range(12))
    pages = remember(allocator, tree, tokens)
    assert found(tree, tokens) == pages[:2]
    assert found(tree, [*tokens, 99]) == pages
    assert found(tree, [*tokens[:7], 99, 99]) == pages[:1]
    assert found(tree, tokens[:3]) == found(tree, []) == found(tree, [99] * 9) == []


def test_branches_share_their_beginning() -> None:
    allocator, tree = make_tree(16)
    stem = list(range(8))
    left = remember(allocator, tree, stem + [1] * 8)
    right = remember(allocator, tree, stem + [2] * 8)
    assert found(tree, stem + [1] * 8 + [0]) == left
    # The tree keeps the pages it knew first.
    assert found(tree, stem + [2] * 8 + [0]) == left[:2] + right[2:]
    assert tree.num_pages == tree.evictable == 6
    assert allocator.used == 6


def test_eviction_takes_the_least_recently_used_ends_first() -> None:
    allocator, tree = make_tree(16)
    old = remember(allocator, tree, [1] * 12)
    new = remember(allocator, tree, [2] * 12)
    found(tree, [1] * 13)
    assert tree.evict(1) == 1
    assert found(tree, [2] * 13) == new[:2]
    assert tree.evict(3) == 3
    assert found(tree, [2] * 13) == new[:2]
    assert found(tree, [1] * 13) == []
    assert allocator.refs(old[0]) == 0


def test_locked_pages_stay() -> None:
    allocator, tree = make_tree(8)
    pages = remember(allocator, tree, [1] * 12)
    remember(allocator, tree, [1] * 8 + [2] * 8)
    match = tree.match(array(TOKEN_TYPE, [1] * 9))
    kept, node = match.pages, match.node
    tree.lock(node)
    assert tree.evict(99) == 3
    assert found(tree, [1] * 13) == kept == pages[:2]
    tree.unlock(node)
    assert tree.clear() == 2
    assert allocator.used == 0


def test_a_split_below_a_lock_keeps_both_parts_locked() -> None:
    allocator, tree = make_tree(8)
    remember(allocator, tree, [1] * 16)
    node = tree.match(array(TOKEN_TYPE, [1] * 17)).node
    tree.lock(node)
    found(tree, [1] * 9)
    assert tree.evictable == 0
    assert tree.clear() == 0
    tree.unlock(node)
    assert tree.evictable == 4
    assert tree.clear() == 4


def test_discard_forgets_what_nothing_else_needs() -> None:
    allocator, tree = make_tree(8)
    remember(allocator, tree, [1] * 8)
    remember(allocator, tree, [1] * 4 + [2] * 4)
    node = tree.match(array(TOKEN_TYPE, [1] * 9)).node
    tree.discard(node)
    assert len(found(tree, [1] * 9)) == 1
    assert len(found(tree, [1] * 4 + [2] * 5)) == 2


def test_with_snapshots_one_goes_on_only_where_one_is() -> None:
    arena = make_arena(RECURRENT, {0: 16, 1: 4})
    pool, blocks = arena.pools
    tree = PrefixTree(pool, PAGE, Snapshots(arena.pools, [256, 768]), needs_snapshots=True)
    tokens = array(TOKEN_TYPE, range(14))
    pages = pool.take(3, "test")
    node = tree.insert(tokens[:12], pages)
    pool.release(pages)

    def snapshot(at: Node, position: int, tail: bytes = b"", born: int = 0) -> Snapshot:
        made = Snapshot(position, tail, (tuple(pool.take(bool(tail), "test")), tuple(blocks.take(1, "test"))), born)
        tree.keep(at, made)
        return made

    match = tree.match(tokens)
    assert (match.position, match.pages, match.known) == (0, [], 12)
    checkpoint = snapshot(node, 12)
    tail = snapshot(node, 13, tokens[12:13].tobytes(), born=5)
    # What step 5 makes, it cannot use itself.
    match = tree.match(tokens, now=5)
    assert (match.position, match.snapshot, match.later, match.pages) == (12, checkpoint, 13, pages)
    assert tree.match(tokens, now=6).snapshot is tail
    assert tree.match(array(TOKEN_TYPE, [*range(12), 99, 99])).snapshot is checkpoint
    # The last token is never left out of a step, and a snapshot behind it is of no use.
    assert tree.match(tokens[:12]).position == 0
    assert tree.match(tokens, salt="other").known == 0
    tree.snapshots.lock(tail)
    assert tree.evict_next(1)
    assert (tree.snapshots.oldest, node.snapshots) == (None, [tail])
    tree.snapshots.unlock(tail)
    tree.drop(tail)
    # Pages that lead to nothing go before anything else.
    other = pool.take(1, "test")
    tree.insert(array(TOKEN_TYPE, [7] * 4), other)
    pool.release(other)
    snapshot(tree.match(array(TOKEN_TYPE, [7] * 5)).deepest, 4)
    assert tree.evict(3) == 3
    assert tree.match(tokens).known == 0
    assert (pool.used, blocks.used) == (1, 1)


def test_what_has_one_salt_is_forgotten_but_for_what_is_in_use() -> None:
    pool, tree = make_tree(16)
    for salt in ("a", "b"):
        pages = pool.take(2, "test")
        tree.insert(array(TOKEN_TYPE, range(8)), pages, salt)
        pool.release(pages)
    node = tree.match(array(TOKEN_TYPE, range(5)), "a").node
    tree.lock(node)
    tree.forget("a")
    assert tree.match(array(TOKEN_TYPE, range(9)), "a").known == 4
    tree.unlock(node)
    tree.forget("a")
    assert tree.match(array(TOKEN_TYPE, range(9)), "a").known == 0
    assert tree.match(array(TOKEN_TYPE, range(9)), "b").known == 8
    assert pool.used == 2


def test_digests_survive_splits_and_evictions() -> None:
    pool, tree = make_tree(16)
    pages = remember(pool, tree, list(range(16)))
    node = tree.match(array(TOKEN_TYPE, range(17))).deepest
    whole = tree.digests(node)[:]
    assert len(whole) == len(pages) == 4
    upper = tree.match(array(TOKEN_TYPE, range(9))).deepest
    assert (tree.digests(upper), tree.digests(node)) == (whole[:2], whole[2:])
    tree.evict(1)
    assert tree.digests(node) == whole[2:3]
    assert tree.find(array(TOKEN_TYPE, range(16)), 3, None) is node
    assert tree.find(array(TOKEN_TYPE, range(16)), 4, None) is None


def test_a_long_prompt_is_found_quickly() -> None:
    allocator, tree = make_tree(8192, page_tokens=16)
    tokens = array(TOKEN_TYPE, [i * 7919 % 50_000 for i in range(8192 * 16)])
    pages = allocator.take(8192, "test")
    for end in range(128, 8192 + 1, 128):
        tree.insert(tokens, pages[:end])
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert len(tree.match(tokens).pages) == 8191
        times.append(time.perf_counter() - begin)
    # About 0.3 ms; the bound leaves room for a busy machine.
    assert min(times) < 0.005


def test_the_queue_of_evictions_stays_small() -> None:
    allocator, tree = make_tree(64)
    for n in range(8):
        remember(allocator, tree, [n] * 8)
    for n in range(2000):
        found(tree, [n % 8] * 9)
    assert len(tree._heap) < 200
    assert tree.clear() == 16


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, share, grow and go while pages are evicted; a dictionary of page contents is the oracle."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.tree = make_tree(24)
        self.content: dict[int, tuple[int, ...]] = {}
        self.held: list[tuple[list[int], list[int], Node]] = []

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens: list[int]) -> object:
        match = self.tree.match(array(TOKEN_TYPE, tokens))
        cached, node = match.pages, match.node
        for i, page in enumerate(cached):
            assert self.content[page] == tuple(tokens[: (i + 1) * PAGE])
        assert len(cached) * PAGE < len(tokens)
        self.tree.lock(node)
        need = len(tokens) // PAGE - len(cached)
        self.tree.evict(need - (24 - self.allocator.used))
        if need > 24 - self.allocator.used:
            assert self.tree.evictable == 0
            self.tree.unlock(node)
            return None
        self.allocator.share(cached)
        fresh = self.allocator.take(need, "test")
        for page in fresh:
            assert all(page not in pages for _, pages, _ in self.held), "a page has two users"
        pages = cached + fresh
        for i, page in enumerate(fresh, start=len(cached)):
            self.content[page] = tuple(tokens[: (i + 1) * PAGE])
        entry = (tokens, pages, node)
        self.held.append(entry)
        return entry

    @rule(entry=consumes(live), share=st.booleans())
    def finish(self, entry: tuple[list[int], list[int], Node] | None, share: bool) -> None:
        if entry is None:
            return
        tokens, pages, node = entry
        self.held = [each for each in self.held if each is not entry]
        if share and pages:
            self.tree.insert(array(TOKEN_TYPE, tokens), pages)
        self.tree.unlock(node)
        self.allocator.release(pages)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        before = self.tree.evictable
        assert self.tree.evict(count) == min(count, before)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        in_tree = list(self.tree.pages())
        assert len(in_tree) == len(set(in_tree)) == self.tree.num_pages
        users = in_tree + [page for _, pages, _ in self.held for page in pages]
        assert self.allocator.num_refs == len(users)
        assert self.allocator.used == len(set(users))

    def teardown(self) -> None:
        for _, pages, node in self.held:
            self.tree.unlock(node)
            self.allocator.release(pages)
        self.tree.clear()
        assert self.allocator.used == 0


TestTree = TreeMachine.TestCase
TestTree.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
