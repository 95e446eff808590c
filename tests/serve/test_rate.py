from __future__ import annotations

import pytest

from treadle.serve.rate import WINDOW_S, Rate


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_rate_of_the_last_seconds():
    clock = Clock()
    rate = Rate(clock)
    assert rate.value() == 0
    rate.add(30)
    assert rate.value() == 0, "no whole second yet"
    clock.now = 101.5
    assert rate.value() == 30
    rate.add(1000)
    assert rate.value() == 30, "this second is not over"
    clock.now = 103.0
    assert rate.value() == pytest.approx(1030 / 3)
    clock.now = 101 + WINDOW_S
    assert rate.value() == 1000 / WINDOW_S
    clock.now = 102 + WINDOW_S
    assert rate.value() == 0


def test_memory_is_bounded_by_the_window():
    clock = Clock()
    rate = Rate(clock)
    for second in range(1000):
        clock.now = 100.0 + second
        rate.add(5)
        rate.add(5)
    assert len(rate._counts) <= WINDOW_S + 1
    assert rate.value() == 10
