from __future__ import annotations

import pytest
import torch

from treadle.graph import machine
from treadle.kernels.backend import open_backend
from treadle.kernels.backend.cuda import CudaBackend, NoCudaError
from treadle.runtime.state.tiers.copies import copy_ranges


def test_without_a_device_the_message_says_why_and_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoCudaError, match="hardware=cpu"):
        open_backend("cuda", threads=1)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_work_runs_in_order_and_its_result_is_on_the_host_once_done(overlap: bool) -> None:
    backend = CudaBackend()
    stream = backend.stream(overlap=overlap)
    memory, host = backend.allocate(1 << 20), backend.host(1 << 20)
    assert memory.data_ptr() % 4096 == 0
    assert host.is_pinned()

    def work(value: int) -> torch.Tensor:
        memory.add_(value)
        return host.copy_(memory, non_blocking=True)

    events = [stream.submit(work, value) for value in (1, 2, 3)]
    assert set(events[-1].wait().tolist()) == {6}
    assert all(event.done for event in events)
    assert events[0].elapsed_s > 0
    with pytest.raises(ZeroDivisionError):
        stream.submit(lambda: 1 // 0).wait()
    stream.close()


@pytest.mark.gpu
def test_a_stream_follows_another_and_copies_go_both_ways() -> None:
    backend = CudaBackend()
    main, side = backend.stream(overlap=True), backend.stream(overlap=True)
    # Large enough to be pinned by itself, and no power of two.
    size = 96 << 20
    memory, host = backend.allocate(size), backend.host(size)
    assert host.is_pinned()
    main.submit(torch.cuda._sleep, 100_000_000)
    main.submit(memory.fill_, 7)
    side.follow(main)
    ranges = [(0, 256, 4096), (8192, 8192, size - 8192)]
    event = side.submit(copy_ranges, backend, memory, host, ranges)
    assert not event.done
    event.wait()
    assert int(host.sum(dtype=torch.int64)) == 7 * (4096 + size - 8192)
    assert int(host[:256].sum()) == 0
    side.submit(memory.zero_)
    side.submit(copy_ranges, backend, host, memory, [(there, begin, count) for begin, there, count in ranges]).wait()
    assert int(memory.sum(dtype=torch.int64)) == 7 * (4096 + size - 8192)
    assert int(memory[4096:8192].sum()) == 0
    main.close()
    side.close()


@pytest.mark.gpu
def test_captured_work_is_done_again_on_new_values() -> None:
    backend = CudaBackend()
    stream = backend.stream(overlap=True)
    x = torch.ones(4, device="cuda")
    stream.submit(lambda: x * 2).wait()
    replay, result = stream.submit(lambda: backend.capture(lambda: x * 2)).wait()

    def again() -> None:
        x.fill_(5)
        replay()

    stream.submit(again).wait()
    assert result.tolist() == [10.0] * 4
    stream.close()


@pytest.mark.gpu
def test_memory_taken_ahead_serves_the_work_of_the_stream() -> None:
    backend = CudaBackend()
    stream = backend.stream(overlap=True)
    backend.trim()
    stream.submit(backend.reserve, 64 << 20).wait()
    reserved = torch.cuda.memory_reserved()
    stream.submit(lambda: [torch.empty(15 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]).wait()
    assert torch.cuda.memory_reserved() == reserved
    facts = backend.memory()
    assert 0 < facts.available_bytes <= facts.total_bytes
    stream.close()


@pytest.mark.gpu
def test_seconds_are_those_of_the_device() -> None:
    backend = CudaBackend()
    x = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    seconds = backend.seconds(lambda: x.add_(1))
    # 512 MiB of traffic: no card moves it in 50 us, and none of today needs 5 ms.
    assert 5e-5 < seconds < 5e-3


@pytest.mark.gpu
def test_features_are_those_that_the_driver_tells() -> None:
    device = machine.cuda_device()
    assert device is not None
    assert CudaBackend().features == {device.capability}


@pytest.mark.gpu
def test_copies_of_ranges_are_launched_in_order_and_none_ends_outside_of_memory() -> None:
    backend = CudaBackend()
    stream = backend.stream(overlap=True)
    memory, host = backend.allocate(1 << 20), backend.host(1 << 20)
    host.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    sizes = [1, 255, 256, 4097, 100_000]
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    ranges = [(begin, (1 << 20) - begin - size, size) for begin, size in zip(begins, sizes)]
    stream.submit(torch.cuda._sleep, 50_000_000)
    stream.submit(backend.copy, host, memory, ranges)
    back = stream.submit(lambda: memory.cpu()).wait()
    for begin, there, size in ranges:
        assert torch.equal(back[there : there + size], host[begin : begin + size])
    assert int(back[: (1 << 20) - sum(sizes)].sum()) == 0
    with pytest.raises(AssertionError, match="outside"):
        stream.submit(backend.copy, host, memory, [(0, (1 << 20) - 1, 2)]).wait()
    stream.close()
