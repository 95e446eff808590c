"""A CPU that captures as a GPU does: work is recorded once and replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.backend.protocol import Replay

T = TypeVar("T")


class CapturingBackend(CpuBackend):
    """Counts what it replays. A result keeps its memory and gets new values."""

    captures = True

    def __init__(self, *, threads: int = 1) -> None:
        super().__init__(threads=threads)
        self.recorded = self.replayed = 0

    def capture(self, work: Callable[[], T]) -> tuple[Replay, T]:
        self.recorded += 1
        result = work()

        def replay() -> None:
            self.replayed += 1
            again = work()
            if isinstance(result, Tensor):
                result.copy_(again)

        return replay, result
