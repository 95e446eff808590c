"""A circuit breaker: what failed several times in a row is not tried again for a while, then by one call at a time."""

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

    def fail(self) -> None:
        """Note a call that failed or was not answered in time."""
        was_open = self.is_open
        self._failures += 1
        if was_open and self._probing:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self.is_open and (self._probing or not was_open):
            self.opened += not was_open
            self._until = self._clock() + self._pause_s
        self._probing = False
