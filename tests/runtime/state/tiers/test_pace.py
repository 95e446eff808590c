from __future__ import annotations

from tiers_engine import Clock

from treadle.runtime.state.tiers.pace import FIRST_RATE, FIRST_STEP_S, IDLE_BYTES, LEAST_BYTES, SHARE, Pace


def test_without_steps_there_is_one_bound() -> None:
    pace = Pace(Clock())
    assert pace.num_bytes == IDLE_BYTES
    pace.tick(False)
    pace.measure(1 << 30, 0.01)
    assert pace.num_bytes == IDLE_BYTES


def test_while_steps_run_copies_take_a_share_of_the_shortest_of_the_last() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.tick(True)
    assert pace.num_bytes == int(SHARE * FIRST_STEP_S * FIRST_RATE)
    for seconds in (0.2, 0.006, 0.004, 0.005):
        clock.now += seconds
        pace.tick(True)
    pace.measure(1 << 30, (1 << 30) / 50e9)
    assert abs(pace.num_bytes - SHARE * 0.004 * 50e9) < 1e3
    for _ in range(4):
        clock.now += 0.1
        pace.tick(True)
    assert pace.num_bytes == IDLE_BYTES


def test_a_pause_is_no_step() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.tick(True)
    pace.tick(False)
    clock.now += 100.0
    pace.tick(True)
    assert pace.num_bytes == int(SHARE * FIRST_STEP_S * FIRST_RATE)


def test_one_slow_copy_is_forgotten_by_small_ones_and_never_is_there_no_room() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.tick(True)
    clock.now += 0.005
    pace.tick(True)
    pace.measure(1 << 20, 0.5)
    assert pace.num_bytes == LEAST_BYTES
    for _ in range(4):
        pace.measure(256 << 10, (256 << 10) / 50e9)
    assert abs(pace.num_bytes - SHARE * 0.005 * 50e9) < 1e3
    for _ in range(4):
        pace.tick(True)
    assert pace.num_bytes == LEAST_BYTES
