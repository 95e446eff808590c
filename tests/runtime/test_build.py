"""Families equal their oracles through the engine: ragged batches, chunked prefill, prefix hits.

Every way to attend, to know positions and to sum residuals is there once with plain references (``passes=reference``)
and, where passes or kernels could mistake it, with fused kernels; one model is compiled. That all families compute what
their descriptions say is tests/graph/test_family.py's.
"""

from pathlib import Path

import pytest
import torch
from capturing_backend import CapturingBackend
from oracle import NEW_TOKENS, tiny
from oracle_engine import DISTINCT, check, engine_of, greedy, resolved
from torch import Tensor

from treadle.graph.program import StepInputs
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.build import program
from treadle.runtime.engine import Engine

LIMITS = ("kv.page_tokens=4", "scheduler.max_num_seqs=4", "scheduler.max_step_tokens=11", "hardware.threads=1")
SMALL = ("hardware=cpu", *LIMITS)
REFERENCE = ("passes=reference", *SMALL)
FUSED = ("passes.compile=false", "passes.quantize=none", *SMALL)


class Recorder:
    """Stands between engine and program and keeps the logits of every row that was asked for."""

    def __init__(self, engine: Engine) -> None:
        self._executor = engine._stepper.executor
        engine._stepper.executor = self
        self.rows: list[Tensor] = []

    def forward(self, inputs: StepInputs) -> Tensor:
        logits = self._executor.forward(inputs)
        self.rows += list(logits.clone())
        return logits


FUSIBLE = (
    "llama-bias", "qwen3-bias-window", "gemma2", "gemma3", "llama-wide-heads", "granite_swa", "cohere-qk-norm-bias",
    "hunyuan_v1_dense", "diffllama", "smollm3-window", "stablelm-parallel", "falcon-alibi", "mpt-clip", "opt-350m",
    "mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss-mxfp4", "glm4-moe", "mimo-v2-flash", "phimoe-options", "llama4",
    "deepseek-v3", "glm-moe-dsa",
)  # fmt: skip


@pytest.mark.parametrize("name", DISTINCT)
def test_references_equal_the_oracle(name: str) -> None:
    check(tiny(name), REFERENCE)


@pytest.mark.parametrize("name", FUSIBLE)
def test_fused_kernels_equal_the_oracle(name: str) -> None:
    check(tiny(name), FUSED)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3", "qwen3-moe"])
def test_captured_steps_of_two_lowerings_equal_the_oracle(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All that a GPU does, its kernels and its captures replaced by the CPU's."""
    backend = CapturingBackend()
    monkeypatch.setattr("treadle.runtime.build.open_backend", lambda device, threads, fixed, cache: backend)
    # Steps of more than 16 tokens are larger than the largest bucket.
    check(tiny(name), (*FUSED, "scheduler.max_step_tokens=20", f"passes.compile_cache={tmp_path}"))
    assert (tmp_path / "timings.json").exists()
    assert backend.replayed > 50


def test_programs_with_references_are_not_captured() -> None:
    for overrides, count in (((*FUSED, "passes.measure=false"), 2), (REFERENCE, 1)):
        made = program(resolved(tiny("llama"), overrides), CapturingBackend())
        assert len(made.lowerings) == count
        assert bool(made.buckets.all) == (count == 2)
        assert len(program(resolved(tiny("llama"), overrides), CpuBackend(threads=1)).lowerings) == 1


@pytest.mark.parametrize("name", ["llama", "glm4-moe"])
def test_compiled_bodies_equal_the_oracle(name: str, tmp_path: Path) -> None:
    check(tiny(name), (*SMALL, f"passes.compile_cache={tmp_path}", "passes.quantize=none"))


def test_more_requests_than_pages_are_preempted_and_equal_the_oracle() -> None:
    case = tiny("llama")
    pages = (len(case.prompts[0]) + NEW_TOKENS) // 4 + 6
    small = (*REFERENCE, "model.max_len=64", f"kv.memory={(pages + 1) * 3072}")
    with engine_of(case, small) as engine:
        prompts, tokens = case.prompts[:2] * 2, case.tokens[:2] * 2
        assert greedy(engine, prompts, "tight") == tokens
        assert engine.stats().preemptions > 0
        assert engine.stats().pages_total <= pages


def test_preempted_requests_come_back_from_host_memory() -> None:
    case = tiny("llama")
    pages = (len(case.prompts[0]) + NEW_TOKENS) // 4 + 6
    small = (*REFERENCE, "model.max_len=64", f"kv.memory={(pages + 1) * 3072}", "kv.host_memory=1MiB")
    with engine_of(case, small) as engine:
        prompts, tokens = case.prompts[:2] * 2, case.tokens[:2] * 2
        assert greedy(engine, prompts, "tight") == tokens
        stats = engine.stats()
        assert stats.preemptions > 0
        assert sum(stats.recomputed_tokens.values()) == 0


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_int8_stays_near_the_full_weights(name: str) -> None:
    case = tiny(name)
    rows = []
    for quantize in ("none", "int8"):
        with engine_of(case, ("passes.compile=false", *SMALL, f"passes.quantize={quantize}")) as engine:
            recorder = Recorder(engine)
            greedy(engine, case.prompts[:1], "one", 1)
            rows.append(torch.stack(recorder.rows))
    error = (rows[0] - rows[1]).norm() / rows[0].norm()
    assert 0 < error < 0.05
