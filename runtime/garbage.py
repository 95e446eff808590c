"""When Python looks for garbage in cycles: at all that is kept, only while nobody waits.

State memory keeps an object or more for every page, and looking through hundreds of thousands of them takes tens of
milliseconds, in which no step is launched. What is young is looked through as ever.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

IDLE_S = 10.0
"""Seconds between two looks at all, at least."""
BUSY_S = 300.0
"""Seconds after which all is looked at even if something runs."""
NEVER = 1 << 30
"""collections of what is young before one of all"""


class Garbage:
    """Takes over from Python, for a block. What is there when the block begins is taken to stay, and not looked at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        gc.collect()
        gc.freeze()
        self._looked = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.set_threshold(*self._thresholds)
        # Or libraries complain at exit about objects of theirs that nobody collects.
        gc.unfreeze()

    def look(self, *, idle: bool) -> None:
        """After a step, look at all if it is time; ``idle``: nothing runs that would wait."""
        if self._clock() - self._looked >= (IDLE_S if idle else BUSY_S):
            gc.collect()
            self._looked = self._clock()
