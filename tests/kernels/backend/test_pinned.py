from __future__ import annotations

import mmap
import os
import platform
from pathlib import Path

import pytest
import torch

from treadle.kernels.backend.pinned import LARGE, pinned, populate


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems find pages when they are touched")
def test_pages_are_found_before_anybody_touches_them() -> None:
    size = (300 << 20) + 5
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    before = resident_bytes()
    populate(memory)
    assert resident_bytes() - before > 299 << 20
    assert memory[:: 1 << 12].count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("size", [5000, LARGE, (300 << 20) + 5])
def test_pinned_memory_is_zeroed_and_given_back(size: int) -> None:
    memory = pinned(size)
    assert memory.is_pinned()
    assert memory.numel() == size
    assert memory.count_nonzero() == 0
    assert torch.equal(memory.to("cuda", non_blocking=True).cpu(), memory)
    before = resident_bytes()
    del memory
    if size > LARGE:
        assert before - resident_bytes() > size // 2
