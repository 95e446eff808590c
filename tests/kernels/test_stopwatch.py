from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.kernels import registry
from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.registry import Kernel
from treadle.kernels.stopwatch import MOST_COPIES, Stopwatch


class Clock(CpuBackend):
    """Says how long work takes by what it does: a kernel adds its cost."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.cost = 0.0
        self.runs = 0

    def seconds(self, work: Callable[[], object]) -> float:
        self.cost, self.runs = 0.0, self.runs + 1
        work()
        return self.cost


def kernel(clock: Clock, name: str, cost: Callable[[int], float]) -> Kernel:
    def run(x: torch.Tensor, factor: float) -> None:
        assert factor == 2.0
        clock.cost += cost(len(x))

    return Kernel(op="add", name=name, function=run, inline=True, supports=registry.always, priority=0)


def calls(*sizes: int) -> dict[str, Callable[[], dict[str, Any]]]:
    return {f"add {size}": lambda size=size: {"x": torch.zeros(size), "factor": 2.0} for size in sizes}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_fastest_over_all_calls_wins_whatever_their_size(clock: Clock, tmp_path: Path) -> None:
    # Steady is 3 times slower for 1 row and 2 times faster for 1000, where a call takes a thousand times longer.
    kernels = [kernel(clock, "add.steady", lambda n: 3.0 + n), kernel(clock, "add.steep", lambda n: 2.0 * n)]
    watch = Stopwatch(clock, tmp_path / "timings.json")
    assert watch.fastest(kernels, calls(1)).name == "add.steep"
    assert watch.fastest(kernels, calls(1000)).name == "add.steady"
    assert watch.fastest(kernels, calls(1, 1000)).name == "add.steep"


def test_timings_are_kept_for_the_same_device_and_candidates(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "timings.json"
    kernels = [kernel(clock, f"add.{n}", lambda n: float(n)) for n in range(2)]
    Stopwatch(clock, file).fastest(kernels, calls(4))
    assert clock.runs == 2
    Stopwatch(clock, file).fastest(kernels, calls(4))
    assert clock.runs == 2
    assert len(json.loads(file.read_text())) == 1
    Stopwatch(clock, file).fastest(kernels[:1], calls(4))
    assert clock.runs == 3
    clock.version = "another"
    Stopwatch(clock, file).fastest(kernels, calls(4))
    assert clock.runs == 5
    assert [path.name for path in file.parent.iterdir()] == ["timings.json"]


def test_a_broken_file_is_measured_anew(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "timings.json"
    file.write_text('{"half')
    kernels = [kernel(clock, f"add.{n}", lambda n: float(n)) for n in range(2)]
    Stopwatch(clock, file).fastest(kernels, calls(4))
    assert len(json.loads(file.read_text())) == 1


def test_small_tensors_are_many_so_that_no_cache_holds_them(clock: Clock, tmp_path: Path) -> None:
    seen = set[int]()

    def run(x: torch.Tensor, factor: float) -> None:
        seen.add(x.data_ptr())
        clock.cost += 1.0

    made = Kernel(op="add", name="add.look", function=run, inline=True, supports=registry.always, priority=0)
    Stopwatch(clock, tmp_path / "t.json").fastest([made], calls(4))
    assert len(seen) == MOST_COPIES + 1
