from __future__ import annotations

import threading

import pytest
import torch

from treadle.kernels.backend import open_backend
from treadle.kernels.backend.cpu import CpuBackend


def test_work_runs_in_order_beside_the_host() -> None:
    stream = CpuBackend(threads=1).stream(overlap=True)
    gate, order = threading.Event(), list[int]()
    first = stream.submit(lambda: (gate.wait(), order.append(1), threading.get_ident())[-1])
    second = stream.submit(order.append, 2)
    assert not first.done
    assert not second.done
    gate.set()
    second.wait()
    assert order == [1, 2]
    assert first.wait() != threading.get_ident()
    assert first.elapsed_s > 0
    stream.close()


def test_without_overlap_work_is_complete_when_submit_returns() -> None:
    stream = CpuBackend(threads=1).stream(overlap=False)
    event = stream.submit(lambda a, b: (a + b, threading.get_ident()), 1, 2)
    assert event.done
    assert event.wait() == (3, threading.get_ident())
    stream.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_comes_out_of_wait_and_the_stream_goes_on(overlap: bool) -> None:
    stream = CpuBackend(threads=1).stream(overlap=overlap)
    broken = stream.submit(lambda: 1 // 0)
    assert stream.submit(lambda: 5).wait() == 5
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    stream.close()


def test_close_finishes_what_was_submitted_and_takes_no_more() -> None:
    stream = CpuBackend(threads=1).stream(overlap=True)
    done = list[int]()
    for n in range(20):
        stream.submit(done.append, n)
    stream.close()
    assert done == list(range(20))
    with pytest.raises(AssertionError, match="closed"):
        stream.submit(done.append, 20)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stream_follows_what_was_submitted_to_another_one(overlap: bool) -> None:
    backend = CpuBackend(threads=1)
    main, side = backend.stream(overlap=True), backend.stream(overlap=overlap)
    gate, order = threading.Event(), list[int]()
    main.submit(lambda: (gate.wait(), order.append(1)))
    if not overlap:
        gate.set()
    side.follow(main)
    behind = side.submit(order.append, 2)
    assert behind.done is not overlap
    gate.set()
    behind.wait()
    assert order == [1, 2]
    # What comes to the other one later is not waited for.
    gate.clear()
    late = main.submit(gate.wait)
    side.submit(order.append, 3).wait()
    gate.set()
    late.wait()
    main.close()
    side.close()


def test_a_stream_nobody_holds_ends_its_thread() -> None:
    stream = CpuBackend(threads=1).stream(overlap=True)
    thread = stream._thread  # type: ignore[union-attr]
    stream.submit(lambda: None).wait()
    del stream
    thread.join(5)
    assert not thread.is_alive()


def test_work_sees_the_thread_count() -> None:
    stream = CpuBackend(threads=1).stream(overlap=True)
    assert stream.submit(torch.get_num_threads).wait() == 1
    stream.close()


def test_memory_is_zeroed_aligned_and_taken_on_first_touch() -> None:
    backend = CpuBackend(threads=1)
    memory = backend.allocate(3 << 20)
    assert (memory.dtype, memory.numel(), memory.data_ptr() % 4096) == (torch.uint8, 3 << 20, 0)
    assert int(memory.sum()) == 0
    memory[-1] = 7
    assert int(memory.view(torch.int32)[-1]) == 7 << 24
    assert backend.allocate(0).numel() == 0
    facts = backend.memory()
    assert 0 < facts.available_bytes <= facts.total_bytes


def test_open_backend() -> None:
    assert open_backend("cpu", threads=1).name == "cpu"
    with pytest.raises(ValueError, match="abacus"):
        open_backend("abacus", threads=1)
    with pytest.raises(ValueError, match="threads=0"):
        open_backend("cpu", threads=0)
