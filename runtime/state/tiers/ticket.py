"""What crosses the border between state memory and its tiers: objects, tickets, and where something was found."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Where(Enum):
    """The nearest place that holds an object."""

    HOST = "host"
    DISK = "disk"
    CONNECTOR = "connector"
    PENDING = "pending"
    """a connector is being asked: ask again after the next ``poll``, or fetch and see"""


class Object(NamedTuple):
    """Bytes of the arena and what they are called elsewhere."""

    key: bytes
    """16 bytes, a hash of all that the bytes depend on"""
    kind: str
    """``page`` or ``checkpoint``, for statistics"""
    offset_units: int
    """where in the arena, in units of 256 bytes"""
    num_bytes: int


class Ticket:
    """The outcome of a transfer, complete after some ``Tiers.poll``; changes in no other call."""

    def __init__(self, count: int = 0) -> None:
        self.ok = [False] * count
        """for each object, in the order given, whether it arrived; final once done"""
        self._left = count

    @property
    def done(self) -> bool:
        """Whether the fate of every object is known, and none of their memory is used any more."""
        return self._left == 0

    def expect(self) -> int:
        """Count in one more object; return its number."""
        self.ok.append(False)
        self._left += 1
        return len(self.ok) - 1

    def settle(self, index: int, ok: bool) -> None:
        """Note the fate of one object."""
        assert self._left > 0, "a ticket is settled more often than it has objects"
        self.ok[index] = ok
        self._left -= 1
