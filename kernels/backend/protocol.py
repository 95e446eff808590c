"""What the engine asks of a device. Everything that differs between platforms outside kernels is behind this.

A *stream* runs submitted work in order, beside the host. On a GPU it is a stream of the driver; on the CPU a thread, so
that the host schedules the next step while this one computes. Work on one stream may rely on all earlier work of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory of the device in bytes, as this process may use it."""

    total_bytes: int
    available_bytes: int


class Event(Protocol[T_co]):
    """The point on a stream where one piece of submitted work is complete."""

    @property
    def done(self) -> bool:
        """Whether the work is complete; never blocks."""
        ...

    @property
    def elapsed_s(self) -> float:
        """Seconds that the work took on the stream; valid once done."""
        ...

    def wait(self) -> T_co:
        """Block until the work is complete and return its result. Raises what the work raised."""
        ...


class Stream(Protocol):
    """An ordered queue of work beside the host."""

    def submit(self, work: Callable[..., T], *args: object) -> Event[T]:
        """Append ``work(*args)`` and return its event, usually before it has run.

        A result that holds tensors is in host memory once the event is done.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted and take no more."""
        ...


class Backend(Protocol):
    """One device."""

    @property
    def name(self) -> str:
        """``cpu`` or ``cuda``."""
        ...

    @property
    def device(self) -> str:
        """The device's name in torch, where tensors are made."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes on the device: [num_bytes] uint8, aligned to 4096."""
        ...

    def stream(self, *, overlap: bool) -> Stream:
        """Return a new stream; without ``overlap``, one whose work is complete when ``submit`` returns."""
        ...

    def memory(self) -> MemoryFacts:
        """Return the device's memory, now."""
        ...
