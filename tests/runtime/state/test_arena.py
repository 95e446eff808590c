"""The arena of several kinds: who gets slabs, what is moved for whom, and what is told about it."""

from __future__ import annotations

import random

import pytest

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import Arena, ArenaError, Kind

PAGE, WINDOW, BLOCK = 0, 1, 2
KINDS = (Kind("full", 512), Kind("window", 768), Kind("block", 3072))
TWO = (KINDS[0], KINDS[2])


def make(num_slabs: int, kinds: tuple[Kind, ...] = KINDS, tail: int = 0) -> Arena:
    """Return an arena of slabs of 3072 bytes."""
    arena = Arena(CpuBackend(threads=1), 3072 * (1 + num_slabs) + tail, kinds, scratch_bytes=3072)
    assert (arena.slabs.slab_bytes, arena.slabs.num_slabs) == (3072, num_slabs)
    return arena


def move(arena: Arena) -> None:
    """Do the moves as the stream does, and forget them."""
    for source, target, num_bytes in arena.moves:
        part = arena.bytes[source * 256 : source * 256 + num_bytes].clone()
        arena.bytes[target * 256 : target * 256 + num_bytes].copy_(part)
    arena.moves.clear()
    arena.moved.clear()


@pytest.mark.parametrize("num_pages", [1, 7, 300, 5000])
@pytest.mark.parametrize("spare", [0, 511])
def test_one_kind_gets_every_page_but_the_scratch(num_pages: int, spare: int) -> None:
    arena = Arena(CpuBackend(threads=1), 512 * (1 + num_pages) + spare, (Kind("full", 512),), scratch_bytes=512)
    pool = arena.pool(0)
    assert arena.available(0) == num_pages
    assert sorted(pool.offsets(pool.take(num_pages, "a"))) == [2 * page for page in range(1, num_pages + 1)]
    assert (arena.available(0), arena.can_take({0: 1}), arena.can_take({0: 0})) == (0, False, True)
    assert arena.usage().stranded_bytes == spare


def test_an_arena_is_zeroed() -> None:
    assert int(make(3).bytes.sum()) == 0


def test_too_small_an_arena_is_refused_with_the_bytes_that_do() -> None:
    backend = CpuBackend(threads=1)
    with pytest.raises(ArenaError, match=r"scratch item of 3072 and one of 512 bytes \(full\) .* it needs 9728") as why:
        Arena(backend, 3072 * 3, KINDS, scratch_bytes=3072)
    needed = int(str(why.value).rsplit(" ", 1)[1])
    Arena(backend, needed, KINDS, scratch_bytes=3072)
    with pytest.raises(ArenaError, match="it needs 1024"):
        Arena(backend, 100, KINDS[:1], scratch_bytes=512)


def test_kinds_are_joint_in_what_they_can_take() -> None:
    arena = make(4)
    assert arena.can_take({PAGE: 6, WINDOW: 4, BLOCK: 2})
    assert not arena.can_take({PAGE: 7, WINDOW: 4, BLOCK: 2})
    assert not arena.can_take({BLOCK: 5})
    blocks = arena.pool(BLOCK).take(3, "a")
    assert arena.can_take({PAGE: 6})
    assert not arena.can_take({PAGE: 7})
    assert not arena.can_take({PAGE: 6, WINDOW: 1})
    assert arena.can_take({PAGE: 6, WINDOW: 1}, released={BLOCK: 1})
    assert [arena.available(kind) for kind in range(3)] == [6, 4, 1]
    arena.pool(BLOCK).release(blocks)
    assert arena.free_slabs == 4


def test_a_kind_in_need_empties_the_slab_of_another_that_costs_least() -> None:
    arena = make(3)
    pool = arena.pool(PAGE)
    pages = pool.take(18, "a")
    pool.release([*pages[1:6], *pages[6:10]])
    assert arena.free_slabs == 0
    at = pool.offset(pages[0])
    arena.bytes[at * 256 : at * 256 + 512] = 7
    block = arena.pool(BLOCK).take(1, "b")[0]
    # One page of the first slab went to a place in the second.
    assert arena.moved == [(PAGE, pages[0])]
    assert [(each.source, each.num_bytes) for each in arena.moves] == [(at, 512)]
    assert pool.offset(pages[0]) == arena.moves[0].target != at
    assert arena.pool(BLOCK).offset(block) == at
    assert arena.evacuated_bytes == arena.usage().evacuated_bytes == 512
    move(arena)
    at = pool.offset(pages[0])
    assert arena.bytes[at * 256 : at * 256 + 512].tolist() == [7] * 512
    assert (pool.total, pool.used, pool.free) == (12, 9, 3)


def test_neighbours_that_stay_neighbours_are_one_copy() -> None:
    arena = make(2, TWO)
    pool = arena.pool(PAGE)
    pages = sorted(pool.take(12, "a"), key=pool.offset)
    pool.release([*pages[3:6], *pages[9:]])
    arena.pool(1).take(1, "b")
    assert len(arena.moved) == 3
    assert sum(each.num_bytes for each in arena.moves) == 3 * 512


def test_pinned_items_stay_where_they_are() -> None:
    arena = make(2, TWO)
    pool = arena.pool(PAGE)
    pages = sorted(pool.take(12, "a"), key=pool.offset)
    pool.release([*pages[1:6], *pages[7:]])
    pool.pin([pages[0]])
    pool.pin([pages[6]])
    assert not arena.can_take({1: 1})
    with pytest.raises(AssertionError, match="b takes 1 items of 0 free, kind block"):
        arena.pool(1).take(1, "b")
    pool.unpin([pages[0]])
    assert arena.can_take({1: 1})
    arena.pool(1).take(1, "b")
    assert arena.moved == [(PAGE, pages[0])]


def test_the_tail_belongs_to_the_kind_that_fills_it() -> None:
    arena = make(3, tail=800)
    assert (arena.slabs.tail_kind, arena.slabs.tail_items(WINDOW)) == (WINDOW, 1)
    assert [arena.available(kind) for kind in range(3)] == [18, 13, 3]
    windows = arena.pool(WINDOW).take(1, "a")
    assert (arena.available(BLOCK), arena.free_slabs) == (3, 3), "what is in the tail takes no slab"
    arena.pool(WINDOW).release(windows)
    assert arena.pool(WINDOW).total == 1, "the tail is never given back"
    assert arena.usage().tail_rest_bytes == 800 - 768


def test_usage_accounts_for_every_byte() -> None:
    arena = make(5, tail=800)
    rng = random.Random(1)
    held = {kind: arena.pool(kind).take(count, "a") for kind, count in ((PAGE, 9), (WINDOW, 8), (BLOCK, 1))}
    for kind, items in held.items():
        arena.pool(kind).release(rng.sample(items, len(items) // 2))
    usage = arena.usage()
    assert usage.used_bytes + usage.unused_bytes + 3072 == arena.bytes.numel()
    for kind, of_kind in enumerate(usage.kinds):
        pool = arena.pool(kind)
        assert of_kind.name == pool.name
        assert of_kind.used_bytes == pool.used * pool.item_bytes
        assert of_kind.free_bytes == pool.free * pool.item_bytes
        assert of_kind.available_bytes == arena.available(kind) * pool.item_bytes
    # 5 pages keep one slab, 4 windows the tail and one, 1 block one: two slabs are anybody's; 32 bytes behind windows
    # in the tail are nobody's.
    assert usage.stranded_bytes == 800 - 768
    assert usage.free_slab_bytes == arena.free_slabs * 3072
    assert 0 < usage.fragmentation < 1
