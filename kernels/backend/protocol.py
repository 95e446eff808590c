"""What the engine asks of a device. Everything that differs between platforms outside kernels is behind this.

A *stream* runs submitted work in order, beside the host. On a GPU it is a stream of the driver; on the CPU a thread, so
that the host schedules the next step while this one computes. Work on one stream may rely on all earlier work of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Replay = Callable[[], None]
"""Does recorded work again, on the stream being worked on, at the cost of one launch."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory of the device in bytes, as this process may use it."""

    total_bytes: int
    available_bytes: int
    reserved_bytes: int = 0
    """that this process holds for tensors, used or not; 0 where they are taken from the system one by one"""


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

    def follow(self, other: Stream) -> None:
        """Let what is submitted from now on run behind all that has been submitted to ``other``; never blocks."""
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

    @property
    def version(self) -> str:
        """What timings hold for: the device's name, and the software that runs on it."""
        ...

    @property
    def features(self) -> frozenset[str]:
        """What kernels of the runtime's own may rely on, as in ``Target.features``."""
        ...

    @property
    def captures(self) -> bool:
        """Whether ``capture`` works here, and so whether padding steps to buckets pays."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes on the device: [num_bytes] uint8, aligned to 4096."""
        ...

    def host(self, num_bytes: int) -> Tensor:
        """Return zeroed host memory that copies to and from the device use without waiting: [num_bytes] uint8.

        It takes no more than was asked for, large as that may be.
        """
        ...

    def copy(self, source: Tensor, target: Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy (begin in ``source``, begin in ``target``, bytes) for all ``ranges``, inside work submitted to a stream.

        Both are [bytes] uint8, from ``allocate`` or ``host``, and outlive the copies; ranges of ``target`` do not
        overlap.
        """
        ...

    def at_work(self, tokens: int) -> AbstractContextManager[None]:
        """Return a block, inside work submitted to a stream, in which a step of so many tokens is computed: in it as
        many threads are used as are best for that while others use the machine too."""
        ...

    def trim(self) -> None:
        """Give back memory that is held and not used."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Take memory that later temporaries of the stream being worked on come from."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Replay, T]:
        """Record ``work()``, which has run before, inside work submitted to a stream; return it with its result.

        A replay reads and writes the same memory every time, and so gives the result new values. The memory comes from
        one pool of the backend: what the caller lets go of is used by later recordings.
        """
        ...

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long ``work()`` takes on the device, the median of several runs without the cost of launching."""
        ...

    def stream(self, *, overlap: bool) -> Stream:
        """Return a new stream; without ``overlap``, one whose work is complete when ``submit`` returns."""
        ...

    def memory(self) -> MemoryFacts:
        """Return the device's memory, now."""
        ...
