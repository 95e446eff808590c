"""What the device can do at best, measured where and when the rows are: memory bandwidth, rate of matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from treadle.kernels.backend.protocol import Backend

LARGEST_BYTES = 2 << 30
LARGEST_HOST_BYTES = 256 << 20
SMALLEST_SIDE, LARGEST_SIDE = 1024, 8192
LONG_ENOUGH_S = 0.02
"""a matrix product that takes this long shows the rate"""


def measure_ceilings(backend: Backend) -> dict[str, float]:
    """Return GB/s of reading, of copying (read and written bytes), of copies from and to pinned host memory, and
    TFLOP/s of square products by dtype."""
    num_bytes = min(LARGEST_BYTES, backend.memory().available_bytes // 8) & ~4095
    # Ones: memory that was never written is one page of zeros in a cache.
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=backend.device)
    read_s = _seconds(backend, source.sum)
    copy_s = _seconds(backend, partial(torch.ones_like(source).copy_, source))
    found = {"read_gb_s": num_bytes / read_s / 1e9, "copy_gb_s": 2 * num_bytes / copy_s / 1e9}
    host = backend.host(min(num_bytes, LARGEST_HOST_BYTES)).view(torch.float32)
    host.fill_(1.0)
    source = source[: len(host)]
    for name, target, origin in (("to_device", source, host), ("to_host", host, source)):
        seconds = _seconds(backend, partial(target.copy_, origin, non_blocking=True))
        found[f"{name}_gb_s"] = host.nbytes / seconds / 1e9
    del source, host
    for dtype in (torch.bfloat16, torch.float32):
        found[f"{str(dtype).removeprefix('torch.')}_tflop_s"] = _product_rate(backend, dtype) / 1e12
    return found


def _product_rate(backend: Backend, dtype: torch.dtype) -> float:
    """Return flop/s of the smallest square product that lasts, random as real activations are."""
    side = SMALLEST_SIDE
    while True:
        left, right = (torch.randn(side, side, device=backend.device).to(dtype) for _ in range(2))
        seconds = _seconds(backend, partial(torch.matmul, left, right))
        if side >= LARGEST_SIDE or seconds >= LONG_ENOUGH_S:
            return 2 * side**3 / seconds
        side *= 2


def _seconds(backend: Backend, work: Callable[[], Tensor], repeats: int = 7) -> float:
    """Return the median seconds of ``work`` on a stream of the device, after two that do not count."""
    stream = backend.stream(overlap=False)
    times = []
    for index in range(2 + repeats):
        event = stream.submit(_run, work)
        event.wait()
        if index >= 2:
            times.append(event.elapsed_s)
    stream.close()
    return statistics.median(times)


def _run(work: Callable[[], Tensor]) -> None:
    work()
