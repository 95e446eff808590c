"""How anything that takes a while says where it is."""

from __future__ import annotations

from typing import Protocol


class OnPhase(Protocol):
    """What a loader calls as it goes: a new name starts a phase; ``done`` of ``total`` moves its progress bar.

    A total of 0 means that nobody knows how much there is.
    """

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Note the phase."""
        ...
