"""How much state may be on its way at a time: as much as keeps the link busy, and less while steps run.

A step's inputs and results cross the same link, on which one copy follows the other whatever their streams. So what is
launched while a step computes has to be through before the next one's inputs come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

IDLE_BYTES = 512 << 20
"""While no step runs: more would fill the driver's queue, and who launches would wait."""
SHARE = 0.5
"""Of the time of a step, for copies."""
STEPS = 4
"""Steps of which the shortest counts: a prompt's take a hundred times as long as those before and behind it."""
FIRST_STEP_S = 0.001
FIRST_RATE = 10e9
"""Bytes a second, until a copy is measured."""
LEAST_BYTES = 1 << 20
"""May always be on its way, and is how much tells the rate."""


class Pace:
    """Watches the time of steps and the rate of copies."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rate = FIRST_RATE
        self._copied = (0, 0.0)
        self._last_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self.steps = False
        """whether steps run"""

    def tick(self, steps: bool) -> None:
        """Note that a step is about to be planned, and whether others run."""
        now = self._clock()
        if not steps:
            self._steps_s.clear()
        elif self.steps:
            self._steps_s.append(now - self._last_s)
        self.steps, self._last_s = steps, now

    def measure(self, num_bytes: int, seconds: float) -> None:
        """Note how long a copy took."""
        copied, took = self._copied[0] + num_bytes, self._copied[1] + seconds
        if copied >= LEAST_BYTES and took > 0:
            self._rate, copied, took = copied / took, 0, 0.0
        self._copied = (copied, took)

    @property
    def num_bytes(self) -> int:
        """What may be on its way in one direction."""
        if not self.steps:
            return IDLE_BYTES
        share = SHARE * min(self._steps_s, default=FIRST_STEP_S) * self._rate
        return min(max(int(share), LEAST_BYTES), IDLE_BYTES)
