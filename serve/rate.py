"""Counts a second, over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10
"""seconds that a rate looks back"""


class Rate:
    """How many a second, averaged over the last WINDOW_S whole seconds, or since the first count if that is later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[int, float]] = deque()
        """(second, what was counted in it), seconds without any left out"""
        self._first_s: int | None = None

    def add(self, count: float) -> None:
        """Count ``count`` now."""
        second = int(self._clock())
        if self._first_s is None:
            self._first_s = second
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = second, self._counts[-1][1] + count
        else:
            self._counts.append((second, count))
            self._drop(second)

    def value(self) -> float:
        """Return the rate; 0 before a whole second has been counted, and after a window without any count."""
        now = int(self._clock())
        self._drop(now)
        if self._first_s is None or self._first_s == now:
            return 0.0
        return sum(count for second, count in self._counts if second < now) / min(WINDOW_S, now - self._first_s)

    def _drop(self, now: int) -> None:
        while self._counts and self._counts[0][0] < now - WINDOW_S:
            self._counts.popleft()
