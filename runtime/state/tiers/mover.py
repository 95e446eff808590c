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

Move = tuple["Entry", int]
"""an entry of the pool, and the offset in the arena in units of 256 bytes"""
Settle = Callable[[bool], None]


class Mover:
    """One stream down (device to host) and one up: links carry both ways at once."""

    def __init__(self, backend: Backend, arena: Tensor, host: Tensor, stream: Stream) -> None:
        """``stream`` is where the arena's content is computed. Shapes: both [bytes] uint8."""
        self._backend, self._arena, self._host, self._main = backend, arena, host, stream
        self._down, self._up = backend.stream(overlap=True), backend.stream(overlap=True)
        self._under_way: dict[bool, deque[tuple[Event[None], Settle]]] = {False: deque(), True: deque()}

    @property
    def busy(self) -> bool:
        """Whether a copy was not yet seen to be complete."""
        return any(self._under_way.values())

    @property
    def ready(self) -> bool:
        """Whether ``poll`` would settle something."""
        return any(under_way and under_way[0][0].done for under_way in self._under_way.values())

    def sink(self, moves: Sequence[Move], settle: Settle) -> None:
        """Copy from the arena, behind all that was launched; ``settle`` is called by a later ``poll``."""
        ranges = [(units * UNIT_BYTES, entry.begin, entry.num_bytes) for entry, units in moves]
        self._down.follow(self._main)
        event = self._down.submit(copy_ranges, self._backend, self._arena, self._host, ranges)
        self._under_way[False].append((event, settle))

    def lift(self, moves: Sequence[Move], settle: Settle) -> None:
        """Copy into the arena, behind all that was launched, which may still read what was there."""
        ranges = [(entry.begin, units * UNIT_BYTES, entry.num_bytes) for entry, units in moves]
        self._up.follow(self._main)
        event = self._up.submit(copy_ranges, self._backend, self._host, self._arena, ranges)
        self._under_way[True].append((event, settle))

    def poll(self) -> None:
        """Settle the copies that are complete."""
        for under_way in self._under_way.values():
            while under_way and under_way[0][0].done:
                event, settle = under_way.popleft()
                try:
                    event.wait()
                except Exception:
                    settle(False)
                else:
                    settle(True)

    def close(self) -> None:
        """Wait for all copies and settle them."""
        self._down.close()
        self._up.close()
        self.poll()
