"""How many threads compute, on a machine that is played: a clock, and a time for every number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from treadle.kernels.backend import crew as module
from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.backend.crew import LONGEST_S, MOST_TOKENS, PROBE, Crew

QUIET: dict[int, float] = {8: 2.0, 4: 3.0, 2: 5.0, 1: 9.0}
BUSY: dict[int, float] = {8: 160.0, 4: 90.0, 2: 30.0, 1: 14.0}
"""milliseconds of a step"""


class Machine:
    """Steps take what ``times`` says, and a little more or less."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int, noise: float = 0.0) -> None:
        self.now, self.set, self.used, self.noise = 0.0, threads, list[int](), noise
        monkeypatch.setattr(module.torch, "set_num_threads", self.take)
        self.crew = Crew(threads, clock=lambda: self.now)
        self.random = torch.Generator().manual_seed(0)

    def take(self, threads: int) -> None:
        self.set = threads

    def run(self, seconds: float, times: Callable[[int], float] | dict[int, float], tokens: int = 1) -> list[int]:
        """Compute steps for so long; return with how many threads each was."""
        self.used, end = [], self.now + seconds
        while self.now < end:
            with self.crew.at_work(tokens):
                self.used.append(self.set)
                spread = 1 + self.noise * float(torch.rand(1, generator=self.random))
                self.now += (times[self.set] if isinstance(times, dict) else times(self.set)) / 1e3 * spread
        return self.used


def share(used: list[int], threads: int) -> float:
    return used.count(threads) / len(used)


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_all_threads_compute_where_that_is_quickest(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    machine = Machine(monkeypatch, 8, noise)
    used = machine.run(60, QUIET)
    assert share(used, 8) > 0.995
    assert machine.set == 8


@pytest.mark.parametrize("noise", [0.0, 0.6])
@pytest.mark.parametrize("before_s", [0, 0.1, 40])
def test_few_do_beside_others_and_all_again_afterwards(
    monkeypatch: pytest.MonkeyPatch, before_s: float, noise: float
) -> None:
    machine = Machine(monkeypatch, 8, noise)
    machine.run(before_s, QUIET)
    # Of three rungs each is looked at after a second.
    machine.run(8, BUSY)
    used = machine.run(30, BUSY)
    assert share(used, 1) > 0.9
    spent = {threads: used.count(threads) * BUSY[threads] for threads in BUSY}
    assert spent[1] > 0.8 * sum(spent.values())
    machine.run(2 * LONGEST_S + 8, QUIET)
    assert share(machine.run(30, QUIET), 8) > 0.99


def test_steps_that_grow_longer_keep_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    used = machine.run(60, lambda threads: {2: 5.0, 1: 9.0}[threads] * (1 + machine.now))
    assert share(used, 2) > 0.9


def test_each_size_has_its_own_number_and_large_steps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.run(5, {2: 9.0, 1: 2.0}, tokens=1)
    assert machine.run(0.01, {2: 9.0, 1: 2.0}, tokens=1)[-1] == 1
    assert machine.run(0.01, {2: 1.0, 1: 2.0}, tokens=2)[0] == 2
    assert set(machine.run(5, {2: 9.0, 1: 2.0}, tokens=MOST_TOKENS + 1)) == {2}


def test_one_that_fails_tells_nothing_and_leaves_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.run(PROBE * 0.005, {2: 5.0, 1: 1.0})

    def fail() -> None:
        with machine.crew.at_work(1):
            assert machine.set == 1, "one is being tried"
            raise ZeroDivisionError

    for _ in range(2 * PROBE):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert machine.set == 2
    assert share(machine.run(1, {2: 5.0, 1: 1.0}), 1) == 1


@pytest.mark.parametrize(("threads", "fixed"), [(1, False), (2, True)])
def test_there_may_be_nothing_to_choose(monkeypatch: pytest.MonkeyPatch, threads: int, fixed: bool) -> None:
    calls = list[int]()
    monkeypatch.setattr(module.torch, "set_num_threads", calls.append)
    backend = CpuBackend(threads=threads, fixed=fixed)
    for _ in range(5 * PROBE):
        with backend.at_work(1):
            pass
    assert calls == [threads], "only when it was made"


def test_torch_really_uses_as_many() -> None:
    crew, before = Crew(2), torch.get_num_threads()
    try:
        seen = set()
        for _ in range(2 * PROBE):
            with crew.at_work(1):
                seen.add(torch.get_num_threads())
        assert seen == {1, 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
