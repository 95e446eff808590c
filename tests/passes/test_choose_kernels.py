"""Kernels chosen by a stopwatch: the fastest where there is a choice, never for what changes state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import tiny
from oracle_graph import graph_of
from toy import HIDDEN, VOCAB, Toy

from treadle.conf.errors import ConfigError
from treadle.conf.schema import PassesConfig
from treadle.graph import ops
from treadle.graph.spec import Moe
from treadle.graph.target import Target
from treadle.kernels import native
from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.registry import Kernel, always, registered
from treadle.kernels.stopwatch import Stopwatch
from treadle.passes.pipeline import pipeline
from treadle.passes.runner import run_passes


class Recorder(Stopwatch):
    """Takes the last candidate, which is the reference, and keeps what it was asked."""

    def __init__(self, file: Path) -> None:
        super().__init__(CpuBackend(threads=1), file)
        self.asked: dict[str, dict[str, Any]] = {}

    def fastest(self, kernels: Sequence[Kernel], calls: Mapping[str, Callable[[], dict[str, Any]]]) -> Kernel:
        self.asked |= {description: make() for description, make in calls.items()}
        return kernels[-1]


def lowered(tmp_path: Path, max_tokens: int | None, toy: Toy | None = None) -> tuple[Recorder, set[str]]:
    stopwatch = Recorder(tmp_path / "timings.json")
    config = PassesConfig(quantize="none", compile=False)
    passes = pipeline(config, Target(device="cpu", page_tokens=4, max_tokens=max_tokens), stopwatch=stopwatch)
    graph = run_passes(passes, (toy or Toy()).graph())
    return stopwatch, {
        node.meta["kernel"] for body in graph.bodies.values() for node in body.ops if "kernel" in node.meta
    }


def test_the_stopwatch_decides_where_there_is_a_choice(tmp_path: Path) -> None:
    stopwatch, kernels = lowered(tmp_path, None)
    assert "linear.reference" in kernels
    assert "linear.cpp" not in kernels
    asked = {description.split()[0] for description in stopwatch.asked}
    assert asked
    # What reads or writes the arena has no meaning on random tensors.
    assert not asked & {*ops.WRITES_STATE, "paged_attention"}


def test_calls_are_timed_at_the_sizes_that_a_program_serves(tmp_path: Path) -> None:
    stopwatch, _ = lowered(tmp_path, 8)
    head = [made for description, made in stopwatch.asked.items() if f"[{VOCAB}, {HIDDEN}]" in description]
    assert [made["x"].shape for made in head] == [torch.Size([1, HIDDEN]), torch.Size([8, HIDDEN])]
    assert head[0]["weight"].shape == (VOCAB, HIDDEN)
    assert head[0]["bias"] is None
    assert head[0]["x"].std() > 0


def test_a_reference_that_cannot_be_traced_is_not_raced(tmp_path: Path) -> None:
    stopwatch, kernels = lowered(tmp_path, None, Toy(moe=Moe(experts=4, top_k=2)))
    assert "experts.cpp" in kernels
    assert not any(description.startswith("experts") for description in stopwatch.asked)


def test_experts_are_timed_with_all_of_them_visited(tmp_path: Path) -> None:
    def other(*_: object) -> None: ...

    toy = Toy(moe=Moe(experts=4, top_k=2))
    other_kernel = Kernel(op="experts", name="experts.other", function=other, inline=False, supports=always, priority=1)
    with registered(other_kernel):
        stopwatch, _ = lowered(tmp_path, None, toy)
    (made, *_) = [made for description, made in stopwatch.asked.items() if description.startswith("experts 1024")]
    assert set(made["ids"].unique().tolist()) == {0, 1, 2, 3}


def test_an_op_that_no_invariant_kernel_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda name: False)
    target = Target(device="cpu", page_tokens=4, deterministic=True)
    with pytest.raises(ConfigError, match=r"of .*float32 has no kernel for cpu.*passes\.deterministic=false"):
        run_passes(pipeline(PassesConfig(quantize="none", compile=False), target), Toy().graph())


@pytest.mark.parametrize("case", ["deepseek-v4"])
def test_what_a_gpu_has_no_kernel_for_is_refused_by_name(case: str) -> None:
    _, graph = graph_of(tiny(case))
    gpu = Target(device="cuda", features=frozenset({"sm_90"}), page_tokens=4)
    with pytest.raises(ConfigError, match=r"has no kernel for cuda yet.*hardware=cpu or passes\.kernels=reference"):
        run_passes(pipeline(PassesConfig(quantize="none", compile=False), gpu), graph)
    run_passes(pipeline(PassesConfig(quantize="none", compile=False), replace(gpu, kernels="reference")), graph)


@pytest.mark.parametrize(
    "case",
    [
        *("gemma4-shared", "gemma4-moe", "hy-v4", "inkling-options", "minimax-m3-options"),
        *("minimax", "recurrent-gemma", "rwkv"),
    ],
)
def test_what_has_kernels_or_is_fused_is_lowered_for_a_gpu(case: str) -> None:
    _, graph = graph_of(tiny(case))
    gpu = Target(device="cuda", features=frozenset({"sm_90"}), page_tokens=4, dtype="bfloat16")
    run_passes(pipeline(PassesConfig(quantize="none", compile=False), gpu), graph)
