"""What connectors were last heard to hold, so that nobody waits for them to say it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from treadle.runtime.state.tiers.lane import Lane, Work

HOLDS_S = 60.0
"""Seconds for which a connector's yes is believed; a load finds out."""
LACKS_S = 2.0
"""Seconds for which its no is."""
MAX_KEYS = 1 << 18
KEYS_A_CALL = 256


class Known:
    """Yes, no or not known, for a connector and a key. The step loop's alone."""

    def __init__(self, lane: Lane, clock: Callable[[], float], *, limit_s: float) -> None:
        self._lane, self._clock, self._limit_s = lane, clock, limit_s
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._asked: set[bytes] = set()

    def holds(self, key: bytes) -> bool | None:
        """Return the connector's last answer, None if there is none or it is old."""
        answer = self._answers.get(key)
        if answer is None or answer[1] <= self._clock():
            return None
        return answer[0]

    def is_asked(self, key: bytes) -> bool:
        """Whether an answer is awaited."""
        return key in self._asked

    @property
    def asking(self) -> bool:
        """Whether any answer is awaited."""
        return bool(self._asked)

    def ask(self, keys: Iterable[bytes]) -> None:
        """Ask the connector about those keys of which nothing is known."""
        new = [key for key in dict.fromkeys(keys) if key not in self._asked and self.holds(key) is None]
        for begin in range(0, len(new), KEYS_A_CALL):
            part = new[begin : begin + KEYS_A_CALL]
            if self._lane.submit("lookup", part, self._note_answers, limit_s=self._limit_s):
                self._asked.update(part)

    def note(self, keys: Sequence[bytes], holds: bool) -> None:
        """Remember what was seen by other means."""
        end = self._clock() + (HOLDS_S if holds else LACKS_S)
        for key in keys:
            self._answers[key] = holds, end
            self._answers.move_to_end(key)
        while len(self._answers) > MAX_KEYS:
            self._answers.popitem(last=False)

    def _note_answers(self, work: Work) -> None:
        self._asked.difference_update(work.keys)
        for holds in (True, False):
            self.note([key for key in work.keys if work.outcome[key] is holds], holds)
