from __future__ import annotations

import random

import pytest
import torch

from treadle.runtime.state.tiers.host import HostPool
from treadle.runtime.state.tiers.seal import SEAL_BYTES, check_seal

SCOPE = bytes(16)
PAGE, BLOCK = 1024 - SEAL_BYTES, 4096 - SEAL_BYTES


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def pool_of(num_bytes: int, *sizes: int) -> HostPool:
    return HostPool(torch.zeros(num_bytes, dtype=torch.uint8), sizes or (PAGE,), scope=SCOPE)


def put(pool: HostPool, n: int, size: int = PAGE) -> bool:
    entry = pool.reserve(key(n), size)
    if entry is None:
        return False
    pool.room(entry)[SEAL_BYTES:] = bytes([n % 256]) * size
    pool.commit(entry)
    pool.release(entry)
    return True


def content(pool: HostPool, n: int) -> bytes | None:
    entry = pool.acquire(key(n))
    if entry is None:
        return None
    data = bytes(pool.sealed(entry))
    assert check_seal(memoryview(data), key=key(n), scope=SCOPE)
    pool.release(entry)
    return data[SEAL_BYTES:]


def test_the_least_recently_used_leaves_first() -> None:
    pool = pool_of(4 * 1024)
    assert all(put(pool, n) for n in range(4))
    assert content(pool, 0) == bytes(PAGE)
    pool.demote(key(2))
    assert put(pool, 4)
    assert put(pool, 5)
    assert [key(n) in pool for n in range(6)] == [True, False, False, True, True, True]
    assert (pool.evictions, len(pool), pool.used_bytes) == (2, 4, 4096)
    assert pool.events()[-3:] == [("stored", key(4)), ("removed", key(1)), ("stored", key(5))]
    assert pool.events() == []


def test_held_and_pinned_objects_stay_and_a_full_pool_refuses() -> None:
    pool = pool_of(3 * 1024)
    for n in range(3):
        put(pool, n)
    held = pool.acquire(key(0))
    assert held is not None
    assert pool.pin(key(1), True, limit=1024)
    assert pool.pin(key(1), True, limit=1024)
    assert not pool.pin(key(2), True, limit=1024)
    assert not pool.pin(key(9), True, limit=1 << 20)
    assert put(pool, 3)
    assert key(2) not in pool
    filling = pool.reserve(key(4), PAGE)
    assert filling is not None
    assert not put(pool, 5)
    assert pool.reserve(key(4), PAGE) is None
    assert pool.acquire(key(4)) is None
    pool.release(filling)
    assert put(pool, 5)
    pool.release(held)
    assert pool.pin(key(1), False, limit=0)
    assert put(pool, 6)
    assert put(pool, 7)
    assert [key(n) in pool for n in (0, 1, 5, 6, 7)] == [False, True, False, True, True]


def test_a_dropped_object_is_gone_at_once_and_its_place_with_the_last_hold() -> None:
    pool = pool_of(2 * 1024)
    put(pool, 0)
    put(pool, 1)
    held = pool.acquire(key(0))
    assert held is not None
    pool.drop(key(0))
    assert key(0) not in pool
    fresh = pool.reserve(key(0), PAGE)
    assert fresh is not None
    assert fresh.offset != held.offset
    assert key(1) not in pool
    assert bytes(pool.room(held)[SEAL_BYTES:]) == bytes(PAGE)
    pool.release(held)
    pool.commit(fresh)
    pool.release(fresh)
    pool.pin(key(0), True, limit=1 << 20)
    pool.drop(key(0))
    pool.drop(key(0))
    assert (pool.used_bytes, pool.pinned_bytes, len(pool)) == (0, 0, 0)


def test_a_place_given_up_frees_its_key_before_its_bytes() -> None:
    pool = pool_of(1024)
    entry = pool.reserve(key(0), PAGE)
    assert entry is not None
    pool.forget(entry)
    assert pool.reserve(key(0), PAGE) is None
    pool.release(entry)
    assert put(pool, 0)


def test_sizes_take_slabs_from_each_other_in_the_order_of_use() -> None:
    pool = pool_of(4 * 4096, PAGE, BLOCK)
    assert pool.slab_bytes == 4096
    assert all(put(pool, n) for n in range(16))
    assert put(pool, 100, BLOCK)
    # The block took the slab whose pages were all used before those of the others.
    assert [key(n) in pool for n in range(16)] == [False] * 4 + [True] * 12
    assert content(pool, 100) == bytes([100]) * BLOCK
    for n in range(20, 32):
        assert put(pool, n)
    assert key(100) in pool
    # All pages are younger than the block now: the next page takes its slab, not the place of a page.
    assert put(pool, 32)
    assert key(100) not in pool
    assert all(key(n) in pool for n in range(20, 33))


def test_what_cannot_fit_is_refused() -> None:
    assert not put(pool_of(4096, BLOCK), 1, BLOCK + 1)
    assert not put(pool_of(1000, BLOCK), 1, BLOCK)
    assert not put(pool_of(0), 1)


@pytest.mark.parametrize("seed", range(3))
def test_random_use_keeps_contents_and_counts(seed: int) -> None:
    draw = random.Random(seed)
    sizes = (PAGE, 2 * 1024 - SEAL_BYTES, BLOCK)
    pool = pool_of(16 * 4096, *sizes)
    size_of = {n: draw.choice(sizes) for n in range(60)}
    for _ in range(3000):
        n = draw.randrange(60)
        match draw.randrange(8):
            case 0:
                pool.drop(key(n))
            case 1:
                pool.pin(key(n), draw.random() < 0.5, limit=3 * 4096)
            case 2:
                pool.demote(key(n))
            case 3 | 4:
                data = content(pool, n)
                assert data in (None, bytes([n]) * size_of[n])
                assert (data is not None) == (key(n) in pool)
            case _:
                assert put(pool, n, size_of[n]) == (key(n) not in pool) or key(n) in pool
    items = [size_of[n] + SEAL_BYTES for n in range(60) if key(n) in pool]
    assert (len(items), sum(items)) == (len(pool), pool.used_bytes)
    for n in range(60):
        pool.drop(key(n))
    assert (pool.used_bytes, pool.pinned_bytes) == (0, 0)
    assert sum(put(pool, n, BLOCK) for n in range(16)) == 16
    assert pool.used_bytes == pool.capacity
