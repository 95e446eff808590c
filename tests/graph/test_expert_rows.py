from hypothesis import given
from hypothesis import strategies as st

from treadle.graph.expert_rows import LEAST_ROWS, blocks_bound, workspace_bytes


@given(st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(any), st.sampled_from([1, 4, 16, 64]))
def test_no_spread_over_the_experts_needs_more_blocks(sizes: list[int], rows: int):
    bound = blocks_bound(sum(sizes), len(sizes) - 1, rows)
    assert sum(-(-size // rows) for size in sizes) <= bound


def test_the_bound_is_reached():
    assert blocks_bound(5, 100, 16) == 5
    assert blocks_bound(16 * 3 + 2, 2, 16) == 5
    assert blocks_bound(65536, 128, 128) == 639


def test_the_workspace_by_hand():
    pairs = 512 * 8
    table = blocks_bound(pairs, 128, LEAST_ROWS) * 3
    counts = 16 * 256
    assert workspace_bytes(512, 8, 128, 2048, 768, 2) == pairs * (768 + 2048) * 2 + (pairs + table + counts) * 4
    # the only output of a row needs no sum
    assert workspace_bytes(1, 1, 1, 2048, 768, 2) == 768 * 2 + (1 + 3 + 2) * 4
