"""Host memory that the device copies to and from by itself, in tens of GiB."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

LARGE = 64 << 20
"""Less than that the allocator of torch gives: it rounds up to powers of two."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: find pages, writable, for a range."""
_THREADS = 4
"""One finds 2 GiB/s, four up to 5, and more no more."""
_RANGE = 128 << 20


def pinned(num_bytes: int) -> Tensor:
    """Return zeroed pinned memory, [num_bytes] uint8. Raises MemoryError if the driver does not pin as much."""
    if num_bytes < LARGE:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    populate(tensor)
    error = _runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
    if int(error) != 0:
        raise MemoryError(f"the driver does not pin {num_bytes} bytes of host memory: {error}")
    weakref.finalize(tensor.untyped_storage(), _unpin, memory, tensor.data_ptr()).atexit = False
    return tensor


def populate(memory: Tensor) -> None:
    """Let the system find pages for memory that begins with one, by several threads. Who touches it first waits for
    what it did not find."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin, size = memory.data_ptr(), memory.numel()
    with ThreadPoolExecutor(_THREADS) as threads:
        for at in range(0, size, _RANGE):
            threads.submit(advise, begin + at, min(_RANGE, size - at), _POPULATE_WRITE)


def _unpin(memory: mmap.mmap, address: int) -> None:
    """Give ``memory`` back to the system once the driver has let go of it."""
    _runtime().cudaHostUnregister(address)
    del memory


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
