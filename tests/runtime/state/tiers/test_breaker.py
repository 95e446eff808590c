from __future__ import annotations

from tiers_engine import Clock

from treadle.runtime.state.tiers.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.fail()
    return breaker


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker = Breaker(Clock())
    for outcome in breaker.fail, breaker.fail, breaker.succeed, breaker.fail, breaker.fail:
        assert breaker.allows()
        outcome()
    assert not breaker.is_open
    breaker.fail()
    assert breaker.is_open
    assert not breaker.allows()
    assert breaker.opened == 1


def test_who_is_late_is_left_alone_at_once() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.fail(late=True)
    assert not breaker.allows()
    assert breaker.opened == 1
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()
    breaker.succeed()
    assert breaker.allows()


def test_one_call_probes_after_a_pause_that_doubles() -> None:
    clock = Clock()
    breaker = opened(clock)
    pause = FIRST_PAUSE_S
    for _ in range(10):
        clock.now += pause * 0.99
        assert not breaker.allows()
        clock.now += pause * 0.02
        assert breaker.allows()
        assert not breaker.allows()
        breaker.fail()
        pause = min(2 * pause, LONGEST_PAUSE_S)
    clock.now += pause
    assert breaker.allows()
    breaker.succeed()
    assert not breaker.is_open
    assert breaker.allows()
    assert breaker.opened == 1


def test_late_failures_of_calls_made_before_do_not_prolong_the_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.9 * FIRST_PAUSE_S
    breaker.fail()
    clock.now += 0.2 * FIRST_PAUSE_S
    assert breaker.allows()


def test_a_late_success_closes_it() -> None:
    breaker = opened(Clock())
    breaker.succeed()
    assert breaker.allows()
