from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.tiers.copies import copy_ranges


class Counting(CpuBackend):
    """Notes the sizes of copies."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.sizes: list[list[int]] = []

    def copy(self, source: Tensor, target: Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.sizes.append([size for _, _, size in ranges])
        super().copy(source, target, ranges)


def test_ranges_that_follow_each_other_in_both_memories_are_one_copy() -> None:
    backend = Counting()
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy_ranges(backend, source, target, [(20, 50, 5), (10, 40, 10), (25, 60, 5), (90, 0, 10)])
    assert backend.sizes == [[15, 5, 10]]
    expected = torch.zeros(100, dtype=torch.uint8)
    expected[40:55], expected[60:65], expected[:10] = source[10:25], source[25:30], source[90:]
    assert torch.equal(target, expected)
    copy_ranges(backend, source, target, [])
    assert torch.equal(target, expected)
