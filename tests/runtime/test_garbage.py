from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from treadle.runtime.garbage import BUSY_S, IDLE_S, Garbage


class Knot:
    """Refers to itself, so that only looking for garbage frees it."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before


def old_knot() -> weakref.ref[Knot]:
    """Return one that looking at what is young does not find any more."""
    knot = Knot()
    for generation in (0, 1):
        gc.collect(generation)
    return weakref.ref(knot)


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_S), (False, BUSY_S)])
def test_all_is_looked_at_when_it_is_time(idle: bool, seconds: float) -> None:
    clock = Clock()
    with Garbage(clock) as garbage:
        knot = old_knot()
        clock.now += seconds - 1
        garbage.look(idle=idle)
        assert knot() is not None
        clock.now += 1
        garbage.look(idle=idle)
        assert knot() is None
        knot = old_knot()
        garbage.look(idle=idle)
        assert knot() is not None
    gc.collect()


def test_python_alone_looks_at_what_is_young_only() -> None:
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    with Garbage():
        gc.callbacks.append(note)
        kept = [[[index]] for index in range(200_000)]
        gc.callbacks.remove(note)
    assert len(kept) == 200_000
    assert set(looked) == {0, 1}


def test_what_was_there_before_is_not_looked_at() -> None:
    with Garbage():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
