"""Pairs put in the order of their experts, and the blocks that they are cut into."""

import pytest
import torch
from triton_mode import DEVICES

from treadle.graph.expert_rows import CHUNK, blocks_bound
from treadle.kernels.experts_order_triton import group_pairs

SHAPES = [(1, 1, 16), (31, 8, 16), (CHUNK, 3, 64), (CHUNK + 1, 200, 16), (5 * CHUNK - 3, 37, 32)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pairs", "experts", "rows"), SHAPES)
@pytest.mark.parametrize("kind", ["any", "one", "none"])
def test_every_pair_is_in_one_block_of_its_expert(device: str, pairs: int, experts: int, rows: int, kind: str):
    ids = torch.randint(-2, experts + 2, (pairs,), generator=torch.Generator().manual_seed(pairs)).int()
    if kind != "any":
        ids = torch.full_like(ids, experts // 2 if kind == "one" else 1 << 30)
    order, table = (value.cpu() for value in group_pairs(ids.to(device), experts, rows))
    group = torch.where((ids >= 0) & (ids < experts), ids, experts)
    assert order.tolist() == group.sort(stable=True).indices.tolist()
    assert table.shape == (blocks_bound(pairs, experts, rows), 3)
    covered = []
    for expert, first, end in table.tolist():
        assert 0 <= end - first <= rows
        covered += range(first, end)
        assert all(group[pair] == expert for pair in order[first:end].tolist())
    assert covered == list(range(pairs))
    used = -(-group.bincount() // rows)
    assert int((table[:, 2] > table[:, 1]).sum()) == int(used.sum())
