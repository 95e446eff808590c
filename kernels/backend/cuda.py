"""One CUDA device: a stream of the driver, pinned host memory, and graphs that share one pool of memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import statistics
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from treadle.kernels.backend.assembler import choose_assembler, driver_major
from treadle.kernels.backend.cuda_copies import launch_copies
from treadle.kernels.backend.kernel_cache import keep_kernels
from treadle.kernels.backend.protocol import MemoryFacts, Replay, Stream

T = TypeVar("T")

_ALIGN = 4096
_LARGE = 64 << 20
_TIMED_RUNS = 7
_CALLS_A_RUN = 10


class NoCudaError(ValueError):
    """torch cannot reach a CUDA device; says why and what works."""


class CudaEvent(Generic[T]):
    """The point on the stream behind one piece of work, with its result or what it raised while it was launched."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the device is past the work."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    @property
    def elapsed_s(self) -> float:
        """Seconds between begin and end of the work on the device."""
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def wait(self) -> T:
        """Block until the device is past the work; return the result or raise what went wrong."""
        if self._error is not None:
            raise self._error
        self._end.synchronize()
        return self._result  # type: ignore[return-value]

    def run(self, work: Callable[..., T], args: tuple[object, ...]) -> None:
        """Launch the work, once, on the current stream."""
        self._begin.record()
        try:
            self._result = work(*args)
        except BaseException as error:
            self._error = error
        self._end.record()


class CudaStream:
    """A stream of the driver beside the default one. Work is launched inside ``submit``, and runs behind it."""

    def __init__(self, stream: torch.cuda.Stream, *, overlap: bool) -> None:
        self._stream = stream
        self._overlap = overlap
        self._open = True

    def submit(self, work: Callable[..., T], *args: object) -> CudaEvent[T]:
        """Launch ``work(*args)`` behind everything submitted before; what it raises comes out of ``wait``."""
        assert self._open, "the stream is closed"
        event: CudaEvent[T] = CudaEvent(_event(), _event())
        with torch.cuda.stream(self._stream):
            event.run(work, args)
        if not self._overlap:
            self._stream.synchronize()
        return event

    def follow(self, other: Stream) -> None:
        """Let the device wait, before what is submitted next, for all that was submitted to ``other``."""
        assert isinstance(other, CudaStream), "a stream of another backend"
        self._stream.wait_stream(other._stream)

    def close(self) -> None:
        """Wait for what was submitted."""
        self._open = False
        self._stream.synchronize()


class CudaBackend:
    """The first visible device. Raises NoCudaError if torch has none."""

    name = "cuda"
    device = "cuda"
    captures = True

    def __init__(self, cache: Path | None = None) -> None:
        """``cache``: where compiled kernels are kept."""
        if not torch.cuda.is_available():
            why = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
            raise NoCudaError(f"hardware.device=cuda, but this torch ({torch.__version__}) {why}; hardware=cpu works")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if cache is not None:
            keep_kernels(cache / "triton")
        parts = torch.cuda.get_device_name(), f"torch {torch.__version__}", f"triton {_triton_version()}"
        major, minor = torch.cuda.get_device_capability()
        assembler = choose_assembler(10 * major + minor, driver_major())
        self.version = ", ".join((*parts, f"ptxas {assembler or 'none'}"))
        self._pool = torch.cuda.graph_pool_handle()
        self.features = frozenset({f"sm_{major}{minor}"})
        # One for all timings: the library of matrix products keeps a workspace for every stream it has seen.
        self._timing_stream = _stream()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes, [num_bytes] uint8 at a 4096-byte boundary."""
        memory = torch.zeros(num_bytes + _ALIGN, dtype=torch.uint8, device=self.device)
        begin = -memory.data_ptr() % _ALIGN
        return memory[begin : begin + num_bytes]

    def host(self, num_bytes: int) -> Tensor:
        """Return zeroed pinned memory. Raises MemoryError if the driver does not pin as much."""
        if num_bytes < _LARGE:
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        # The allocator of torch would round this up to the next power of two.
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        error = _runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise MemoryError(f"the driver does not pin {num_bytes} bytes of host memory: {error}")
        weakref.finalize(tensor.untyped_storage(), _unpin, memory, tensor.data_ptr()).atexit = False
        return tensor

    def copy(self, source: Tensor, target: Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Launch copies of byte ranges on the current stream, not the default one.

        Raises RuntimeError if the driver refuses.
        """
        for begin, there, size in ranges:
            assert begin + size <= source.numel(), "a range ends outside of memory"
            assert there + size <= target.numel(), "a range ends outside of memory"
        stream = torch.cuda.current_stream().cuda_stream
        launch_copies(target.data_ptr(), source.data_ptr(), ranges, stream)

    def at_work(self, tokens: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002  (the device decides)
        """Nothing: threads of the host compute nothing."""
        return contextlib.nullcontext()

    def trim(self) -> None:
        """Give unused blocks of the allocator back to the driver, workspaces of matrix products among them.

        What was captured before may use them, so it must not be replayed.
        """
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def reserve(self, num_bytes: int) -> None:
        """Make the allocator hold one free block of ``num_bytes`` for the current stream."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def stream(self, *, overlap: bool) -> CudaStream:
        """Return a new stream behind all that has been launched; without ``overlap`` each work is waited for."""
        torch.cuda.synchronize()
        return CudaStream(_stream(), overlap=overlap)

    def capture(self, work: Callable[[], T]) -> tuple[Replay, T]:
        """Record ``work()`` on the current stream; it is not run. Raises what the work raises."""
        graph = torch.cuda.CUDAGraph()
        # The context manager of torch would empty the allocator's cache and collect garbage for each of many graphs.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        return graph.replay, result

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of ``work`` on the device, from replays of a graph that holds several calls."""
        stream = self._timing_stream
        stream.wait_stream(torch.cuda.current_stream())
        graph, times = torch.cuda.CUDAGraph(), list[float]()
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(_CALLS_A_RUN):
                work()
            graph.capture_end()
            begin, end = _event(), _event()
            graph.replay()
            for _ in range(_TIMED_RUNS):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3 / _CALLS_A_RUN)
        torch.cuda.current_stream().wait_stream(stream)
        return statistics.median(times)

    def memory(self) -> MemoryFacts:
        """Return the device's memory: what is free counts what the allocator holds and nobody uses."""
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        unused = reserved - torch.cuda.memory_allocated()
        return MemoryFacts(total_bytes=total, available_bytes=free + unused, reserved_bytes=reserved)


def _unpin(memory: mmap.mmap, address: int) -> None:
    """Give ``memory`` back to the system once the driver has let go of it."""
    _runtime().cudaHostUnregister(address)
    del memory


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"
