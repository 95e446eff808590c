"""The CPU as a device: its stream is one thread, whose torch operations let the host thread run meanwhile."""

from __future__ import annotations

import contextlib
import mmap
import queue
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from treadle.graph import machine
from treadle.kernels.backend.crew import Crew
from treadle.kernels.backend.protocol import MemoryFacts, Replay, Stream

T = TypeVar("T")

_TIMED_RUNS = 7


class CpuEvent(Generic[T]):
    """Completion of one piece of work, with its result or exception."""

    def __init__(self, work: Callable[..., T], args: tuple[object, ...]) -> None:
        self._work: Callable[..., T] | None = work
        self._args = args
        self._finished = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.elapsed_s = 0.0

    @property
    def done(self) -> bool:
        """Whether the work is complete."""
        return self._finished.is_set()

    def wait(self) -> T:
        """Block until complete; return the result or raise what the work raised."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        """Do the work, once, on the calling thread."""
        assert self._work is not None, "work runs once"
        begin = time.perf_counter()
        try:
            self._result = self._work(*self._args)
        except BaseException as error:
            self._error = error
        self.elapsed_s = time.perf_counter() - begin
        # The event outlives the work: what the work held is let go here.
        self._work, self._args = None, ()
        self._finished.set()


class InlineStream:
    """A stream whose work runs inside ``submit``; it is the one stream on which ``follow`` has to wait."""

    def submit(self, work: Callable[..., T], *args: object) -> CpuEvent[T]:
        """Run ``work(*args)`` now; its exception is raised by the event's ``wait``."""
        event = CpuEvent(work, args)
        event.run()
        return event

    def follow(self, other: Stream) -> None:
        """Wait for what was submitted to ``other``: what is submitted here runs at once."""
        other.submit(_nothing).wait()

    def close(self) -> None:
        """Nothing is pending."""


class ThreadStream:
    """A stream that is one worker thread. It ends with ``close``, or when nobody holds the stream any more."""

    def __init__(self, threads: int) -> None:
        self._queue: queue.SimpleQueue[CpuEvent[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_drain, args=(self._queue, threads), name="stream", daemon=True)
        self._thread.start()
        # The thread knows only the queue, never the stream, so that the stream can be collected.
        self._stop = weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[..., T], *args: object) -> CpuEvent[T]:
        """Queue ``work(*args)`` behind everything submitted before."""
        assert self._stop.alive, "the stream is closed"
        event = CpuEvent(work, args)
        self._queue.put(event)  # type: ignore[arg-type]
        return event

    def follow(self, other: Stream) -> None:
        """Let the thread wait, before what is submitted next, for all that was submitted to ``other``."""
        reached = other.submit(_nothing)
        if not reached.done:
            self.submit(reached.wait)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._stop()
        self._thread.join()


def _nothing() -> None:
    """Mark a point of a stream."""


def _drain(work: queue.SimpleQueue[CpuEvent[object] | None], threads: int) -> None:
    # OpenMP keeps its thread count per host thread, and torch only hands its own on for some of its loops.
    torch.set_num_threads(threads)
    while (event := work.get()) is not None:
        event.run()
        # While the queue blocks, nothing of the last step is kept alive.
        del event


class CpuBackend:
    """The machine's cores and main memory. ``threads`` is what one operation may use; ``fixed``: and always uses."""

    name = "cpu"
    device = "cpu"
    features: frozenset[str] = frozenset()
    captures = False

    def __init__(self, *, threads: int, fixed: bool = False) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a CPU backend computes with at least 1")
        self.threads = threads
        self.version = f"{machine.cpu_name()}, {threads} threads, torch {torch.__version__}"
        torch.set_num_threads(threads)
        self._crew = None if fixed else Crew(threads)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes, [num_bytes] uint8 at a 4096-byte boundary; the system provides pages on first touch."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Kernels built without huge pages refuse the advice; ordinary pages do.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def host(self, num_bytes: int) -> Tensor:
        """Return zeroed memory: the device's own."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy byte ranges, one after the other."""
        for begin, there, size in ranges:
            target[there : there + size].copy_(source[begin : begin + size])

    def at_work(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Return a block for a step of so many tokens, in which fewer threads compute if that is quicker."""
        return contextlib.nullcontext() if self._crew is None else self._crew.at_work(tokens)

    def trim(self) -> None:
        """Nothing: what is not used is not held."""

    def reserve(self, num_bytes: int) -> None:
        """Nothing: the system provides memory as it is touched."""

    def capture(self, work: Callable[[], T]) -> tuple[Replay, T]:
        """Refuse: launching costs nothing here."""
        raise NotImplementedError("work is not captured on a CPU")

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of a call of ``work``."""
        times = []
        for _ in range(_TIMED_RUNS):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def stream(self, *, overlap: bool) -> InlineStream | ThreadStream:
        """Return a worker thread, or with ``overlap`` off a stream that runs on the caller's."""
        return ThreadStream(self.threads) if overlap else InlineStream()

    def memory(self) -> MemoryFacts:
        """Return main memory, or less where the process's control group has a limit."""
        return MemoryFacts(total_bytes=machine.memory_bytes(), available_bytes=machine.available_bytes())
