"""Copies that the driver launches; without a GPU by a driver that copies at once."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from treadle.kernels.backend import cuda_copies
from treadle.kernels.backend.cuda import CudaBackend
from treadle.kernels.backend.cuda_copies import launch_copies

STREAM = 7


class OneByOne:
    """A driver of before CUDA 13."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> int:
        assert stream == STREAM
        self.calls.append(1)
        ctypes.memmove(target, source, size)
        return 0


class Together(OneByOne):
    """One that takes many at once."""

    def cuMemcpyBatchAsync_v2(self, targets, sources, sizes, count, how, first, kinds, stream) -> int:
        assert (stream, kinds, first._obj.value) == (STREAM, 1, 0)
        assert (how._obj.source_order, how._obj.flags) == (1, 0)
        assert len(targets) == len(sources) == len(sizes) == count
        self.calls.append(count)
        for target, source, size in zip(targets, sources, sizes):
            ctypes.memmove(target, source, size)
        return 0


def pieces(count: int) -> list[tuple[int, int, int]]:
    """``count`` ranges of different lengths in another order each."""
    rng = random.Random(count)
    sizes = [rng.randrange(1, 300) for _ in range(count)]
    there, begins = 0, {}
    for index in rng.sample(range(count), count):
        begins[index] = there
        there += sizes[index]
    return [(sum(sizes[:index]), begins[index], size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("count", [0, 1, 128, 300])
@pytest.mark.parametrize("driver", [OneByOne, Together])
def test_every_range_arrives(driver: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ranges = driver(), pieces(count)
    monkeypatch.setattr(cuda_copies, "_driver", lambda: made)
    size = sum(each for _, _, each in ranges)
    source, target = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    launch_copies(target.data_ptr(), source.data_ptr(), ranges, STREAM)
    for begin, there, length in ranges:
        assert torch.equal(target[there : there + length], source[begin : begin + length])
    assert sum(made.calls) == count
    if driver is Together:
        assert len(made.calls) == -(-count // 128)


@pytest.mark.parametrize("driver", [OneByOne, Together])
def test_what_the_driver_refuses_is_an_error(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = driver()
    for name in ("cuMemcpyAsync", "cuMemcpyBatchAsync_v2"):
        if hasattr(made, name):
            monkeypatch.setattr(made, name, lambda *_: 1)
    monkeypatch.setattr(cuda_copies, "_driver", lambda: made)
    with pytest.raises(RuntimeError, match="CUDA error 1, 1 copies"):
        launch_copies(0, 0, [(0, 0, 1)], STREAM)


@pytest.mark.gpu
@pytest.mark.parametrize("up", [True, False])
def test_the_driver_copies_many_at_once(up: bool) -> None:
    backend, ranges = CudaBackend(), pieces(300)
    size = sum(each for _, _, each in ranges)
    stream = backend.stream(overlap=True)
    host, memory = backend.host(size), backend.allocate(size)
    source, target = (host, memory) if up else (memory, host)
    source.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    torch.cuda.synchronize()
    stream.submit(torch.cuda._sleep, 20_000_000)
    event = stream.submit(backend.copy, source, target, ranges)
    assert not event.done
    event.wait()
    one, other = source.cpu(), target.cpu()
    assert all(torch.equal(other[b : b + n], one[a : a + n]) for a, b, n in ranges)
    with pytest.raises(RuntimeError, match="does not copy"):
        stream.submit(launch_copies, 0, 0, [(0, 0, 64)], stream._stream.cuda_stream).wait()
    stream.close()
