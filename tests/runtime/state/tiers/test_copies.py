from __future__ import annotations

import pytest
import torch

from treadle.runtime.state.tiers import copies
from treadle.runtime.state.tiers.copies import copy_ranges


def test_ranges_that_follow_each_other_in_both_memories_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    calls = []
    real = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        calls.append([each.numel() for each in targets])
        real(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(copies.torch, "_foreach_copy_", counted)
    copy_ranges(source, target, [(20, 50, 5), (10, 40, 10), (25, 60, 5), (90, 0, 10)])
    assert calls == [[15, 5, 10]]
    expected = torch.zeros(100, dtype=torch.uint8)
    expected[40:55], expected[60:65], expected[:10] = source[10:25], source[25:30], source[90:]
    assert torch.equal(target, expected)
    copy_ranges(source, target, [])
    assert len(calls) == 1
