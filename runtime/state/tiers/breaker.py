"""A circuit breaker: who was late, or failed several times in a row, is left alone for a while, then asked once.

An error costs little and may be of one object; who did not answer in time has had somebody wait for all of it.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Counts failures in a row. Not safe for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0
        self._probing = False
        self.opened = 0
        """times that it opened"""

    @property
    def is_open(self) -> bool:
        """Whether calls are held off, but for a probe now and then."""
        return self._failures >= FAILURES

    @property
    def pauses(self) -> bool:
        """Whether no call at all may be made now."""
        return self.is_open and (self._probing or self._clock() < self._until)

    def allows(self) -> bool:
        """Whether a call may be made; its outcome must be told by ``succeed`` or ``fail``."""
        if self.pauses:
            return False
        self._probing = self.is_open
        return True

    def succeed(self) -> None:
        """Note a call that worked."""
        self._failures, self._pause_s, self._probing = 0, FIRST_PAUSE_S, False

    def fail(self, *, late: bool = False) -> None:
        """Note a call that failed; ``late``: was not answered in time, which opens it at once."""
        was_open = self.is_open
        self._failures = max(self._failures + 1, FAILURES if late else 0)
        if was_open and self._probing:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self.is_open and (self._probing or not was_open):
            self.opened += not was_open
            self._until = self._clock() + self._pause_s
        self._probing = False
