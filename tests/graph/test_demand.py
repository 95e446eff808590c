"""What sequences need of every kind of state, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.graph.demand import Demand
from treadle.graph.state import Block, BlockPart, LayerKV, PagedKV, State

LAYER = LayerKV(kv_heads=2, k_dim=64, v_dim=64)
FULL = PagedKV(name="kv", layers=(LAYER,) * 2, dtype="bfloat16", page_tokens=16)
WINDOW = PagedKV(name="window 64", layers=(LAYER,) * 6, dtype="bfloat16", page_tokens=16, window=64)
CHUNK = PagedKV(name="chunk 128", layers=(LAYER,), dtype="bfloat16", page_tokens=16, chunk=128)
BLOCK = Block(parts=(BlockPart(kind="delta", shape=(8, 64, 64), dtype="float32"),))
HYBRID = Demand(State(groups=(FULL, WINDOW, CHUNK), block=BLOCK), step_tokens=256)
PLAIN = Demand(State(groups=(FULL,)), step_tokens=256)


def test_kinds_are_groups_and_the_block() -> None:
    assert HYBRID.names == ("kv", "window 64", "chunk 128", "block")
    assert HYBRID.item_bytes == (2 * 8192, 6 * 8192, 8192, 8 * 64 * 64 * 4)
    assert (PLAIN.names, PLAIN.item_bytes) == (("kv",), (2 * 8192,))


def test_a_sequence_has_all_its_pages_a_window_and_a_block() -> None:
    # window 64 + 256 of a step are 20 pages, and one where they begin inside a page
    assert HYBRID.sequence(4096) == [256, 21, 25, 1]
    assert HYBRID.sequence(4096, step_tokens=1) == [256, 6, 10, 1]
    assert HYBRID.sequence(40) == [3, 3, 3, 1]
    assert PLAIN.sequence(4097) == [257]


@pytest.mark.parametrize("group", [WINDOW, CHUNK])
@pytest.mark.parametrize("step", [1, 5, 16, 100])
def test_no_step_needs_more_pages_than_were_planned(group: PagedKV, step: int) -> None:
    most, length = group.most_pages(700, step), 700
    for start in range(0, length - step, 7):
        first = group.first_needed(start) // 16
        assert (start + step - 1) // 16 - first + 1 <= most


def test_a_checkpoint_has_the_last_window_and_a_block() -> None:
    assert HYBRID.checkpoint(4096) == [0, 6, 10, 1]
    assert PLAIN.checkpoint(4096) == [0]
    assert replace(HYBRID, checkpoints=False).checkpoint(4096) == [0, 0, 0, 0]


def test_one_reads_its_prompt_while_the_rest_answer() -> None:
    assert HYBRID.running(3, 4096) == [3 * 256, 21 + 2 * 6, 25 + 2 * 10, 3]
    assert PLAIN.running(3, 4096) == [3 * 256]


def test_least_is_a_sequence_with_a_page_to_grow_and_a_checkpoint() -> None:
    assert HYBRID.least(1, 4096) == [257, 21 + 6, 25 + 10, 2]
    assert HYBRID.least(1000, 4096) == [1000, 21 + 6, 25 + 10, 2]
    assert PLAIN.least(1, 4096) == [257]


def test_an_arena_for_it_holds_it() -> None:
    counts = HYBRID.running(5, 4096)
    assert HYBRID.fits(counts, HYBRID.arena_bytes(counts))
    assert not HYBRID.fits(counts, sum(count * size for count, size in zip(counts, HYBRID.item_bytes)))
    assert PLAIN.arena_bytes([10]) == 11 * FULL.page_bytes
    assert not PLAIN.fits([0], FULL.page_bytes - 1)


def test_an_arena_of_pages_alone_is_a_whole_number_of_them() -> None:
    assert PLAIN.usable(10 * FULL.page_bytes + 300) == 10 * FULL.page_bytes
    assert HYBRID.usable(10 * FULL.page_bytes + 300) == 10 * FULL.page_bytes + 256
