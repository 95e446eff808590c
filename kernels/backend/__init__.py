"""The device protocol and its implementations; each platform's module is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.kernels.backend.protocol import Backend


def open_backend(device: str, *, threads: int, fixed: bool = False, cache: Path | None = None) -> Backend:
    """Return the backend of ``device``; ``threads`` are the CPU threads of one operation, at most, or with ``fixed``
    always: sums of some kernels may depend on them by a bit. What is compiled for the device is kept in ``cache``.

    Raises: ValueError if there is none for the device.
    """
    if device == "cpu":
        from treadle.kernels.backend.cpu import CpuBackend

        return CpuBackend(threads=threads, fixed=fixed)
    if device == "cuda":
        from treadle.kernels.backend.cuda import CudaBackend

        return CudaBackend(cache)
    raise ValueError(f"hardware.device={device}: there is no backend for it; there are cpu and cuda")
