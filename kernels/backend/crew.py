"""How many threads compute a step: as many as are quickest while others use the machine too.

A parallel region ends when the last of its threads has come. One that waits for a core holds up all others for
milliseconds, in each of hundreds of regions: beside two busy processes on two cores a model of 135M parameters gave 5
tokens/s in two threads, and 24 in one.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MOST_TOKENS = 64
"""Larger steps have few regions for their work, and always get all threads."""
PROBE = 3
"""Steps of which the median counts."""
GAIN = 0.85
"""What another number must take at most of the time to be taken."""
WORSE = 1.5
"""What steps must take, of what they took when the number was last looked at, to look at once; and a step with another
number, of what is usual, to be the last of its kind."""
FIRST_S, LONGEST_S = 1.0, 16.0
"""Seconds until another number is tried; twice as many each time that it does not help."""


class Crew:
    """Tries numbers of threads on the steps that are to be computed, and keeps the quickest for each size of steps."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``threads``: the most, and what every other work gets."""
        self._threads, self._clock = threads, clock
        ladder = [threads]
        while ladder[-1] > 1:
            ladder.append(ladder[-1] // 2)
        self._sizes: defaultdict[int, _Size] = defaultdict(lambda: _Size(ladder))

    @contextmanager
    def at_work(self, tokens: int) -> Iterator[None]:
        """Within the block torch, and kernels that ask it, use as many threads as are best for ``tokens``."""
        if tokens > MOST_TOKENS or self._threads == 1:
            yield
            return
        size = self._sizes[tokens]
        begin = self._clock()
        count = size.choose(begin)
        if count < self._threads:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if count < self._threads:
                torch.set_num_threads(self._threads)
        end = self._clock()
        size.note(end - begin, end)


class _Size:
    """What is known of steps of one size."""

    def __init__(self, ladder: list[int]) -> None:
        self._ladder = ladder
        self._at = 0
        """which of the ladder is used"""
        self._recent: deque[float] = deque(maxlen=PROBE)
        self._base_s = float("inf")
        """what a step took when the number was last looked at"""
        self._tried_at: int | None = None
        self._tried: list[float] = []
        self._turn = 0
        self._wait_s, self._due_s = FIRST_S, 0.0

    def choose(self, now: float) -> int:
        """Return how many threads compute the next step."""
        if self._tried_at is None and len(self._recent) == PROBE and (now >= self._due_s or self._suffers()):
            neighbours = [each for each in (self._at + 1, self._at - 1) if 0 <= each < len(self._ladder)]
            self._tried_at = neighbours[self._turn % len(neighbours)]
            self._turn += 1
        return self._ladder[self._at if self._tried_at is None else self._tried_at]

    def note(self, seconds: float, now: float) -> None:
        """Take in how long it took."""
        if self._tried_at is None:
            self._recent.append(seconds)
            return
        self._tried.append(seconds)
        usual = statistics.median(self._recent)
        if len(self._tried) < PROBE and seconds < WORSE * usual:
            return
        if statistics.median(self._tried) < GAIN * usual:
            self._at, self._recent = self._tried_at, deque(self._tried, maxlen=PROBE)
            self._wait_s = FIRST_S
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        self._base_s, self._due_s = statistics.median(self._recent), now + self._wait_s
        self._tried_at, self._tried = None, []

    def _suffers(self) -> bool:
        """Whether steps take much longer than they did. With fewer threads they do so without a reason to have more."""
        return self._at < len(self._ladder) - 1 and statistics.median(self._recent) > WORSE * self._base_s
