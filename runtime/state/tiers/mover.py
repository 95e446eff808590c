"""Copies between the arena and the host pool, on streams of their own behind the work that was launched before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.graph.state import UNIT_BYTES
from treadle.runtime.state.tiers.copies import copy_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.kernels.backend.protocol import Backend, Event, Stream
    from treadle.runtime.state.tiers.host import Entry
    from treadle.runtime.state.tiers.pace import Pace

Move = tuple["Entry", int]
"""an entry of the pool, and the offset in the arena in units of 256 bytes"""
Settle = Callable[[bool], None]


class Mover:
    """One stream down (device to host) and one up: links carry both ways at once."""

    def __init__(self, backend: Backend, arena: Tensor, host: Tensor, stream: Stream, pace: Pace) -> None:
        """``stream`` is where the arena's content is computed. Shapes: both [bytes] uint8."""
        self._backend, self._arena, self._host, self._main = backend, arena, host, stream
        self._down, self._up = backend.stream(overlap=True), backend.stream(overlap=True)
        self._pace = pace
        self._under_way: dict[bool, deque[tuple[Event[None], Settle, int]]] = {False: deque(), True: deque()}
        self.lifting_bytes = 0
        """on their way into the arena"""

    @property
    def busy(self) -> bool:
        """Whether a copy was not yet seen to be complete."""
        return any(self._under_way.values())

    @property
    def ready(self) -> bool:
        """Whether ``poll`` would settle something."""
        return any(under_way and under_way[0][0].done for under_way in self._under_way.values())

    def mark(self) -> Event[None]:
        """Return the end of all that was launched."""
        return self._main.submit(_nothing)

    def sink(self, moves: Sequence[Move], settle: Settle) -> None:
        """Copy from the arena, behind all that was launched; ``settle`` is called by a later ``poll``."""
        ranges = [(units * UNIT_BYTES, entry.begin, entry.num_bytes) for entry, units in moves]
        self._down.follow(self._main)
        event = self._down.submit(copy_ranges, self._backend, self._arena, self._host, ranges)
        self._under_way[False].append((event, settle, sum(size for _, _, size in ranges)))

    def lift(self, moves: Sequence[Move], settle: Settle, *, follow: bool) -> None:
        """Copy into the arena; with ``follow`` behind all that was launched, which may still read what was there."""
        ranges = [(entry.begin, units * UNIT_BYTES, entry.num_bytes) for entry, units in moves]
        if follow:
            self._up.follow(self._main)
        event = self._up.submit(copy_ranges, self._backend, self._host, self._arena, ranges)
        num_bytes = sum(size for _, _, size in ranges)
        self.lifting_bytes += num_bytes
        self._under_way[True].append((event, settle, num_bytes))

    def poll(self) -> None:
        """Settle the copies that are complete."""
        for up, under_way in self._under_way.items():
            while under_way and under_way[0][0].done:
                event, settle, num_bytes = under_way.popleft()
                self.lifting_bytes -= num_bytes if up else 0
                try:
                    event.wait()
                except Exception:
                    settle(False)
                else:
                    self._pace.measure(num_bytes, event.elapsed_s)
                    settle(True)

    def close(self) -> None:
        """Wait for all copies and settle them."""
        self._down.close()
        self._up.close()
        self.poll()


def _nothing() -> None:
    """Mark a point of a stream."""
