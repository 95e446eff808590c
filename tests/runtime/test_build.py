"""Every family equals its oracle through the engine: ragged batches, chunked prefill, prefix hits, all options varied.

Most run plain references (``passes=reference``); each family once runs its fused kernels, and one is compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from capturing_backend import CapturingBackend
from oracle import CASES, NEW_TOKENS, VOCAB, Tiny, tiny
from torch import Tensor

from treadle.conf.load import compose
from treadle.graph.program import StepInputs
from treadle.graph.resolve import Resolved, resolve
from treadle.runtime.build import build_engine, program
from treadle.runtime.engine import Engine
from treadle.runtime.request import Request, SamplingParams

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


def resolved(case: Tiny, overrides: Sequence[str]) -> Resolved:
    return resolve(compose(["model=hf", f"model.path={case.path}", "model.dtype=float32", *overrides]))


@contextmanager
def engine_of(case: Tiny, overrides: Sequence[str]) -> Iterator[Engine]:
    engine = build_engine(resolved(case, overrides), lambda phase, done=0, total=0: None)
    try:
        yield engine
    finally:
        engine.close()


def greedy(engine: Engine, prompts: Sequence[list[int]], tag: str, count: int = NEW_TOKENS) -> list[list[int]]:
    """Run all prompts together and return their tokens."""
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        answers[f"{tag}{index}"] = []
        engine.add(Request(id=f"{tag}{index}", prompt=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.id] += output.token_ids
    return list(answers.values())


def first_logprobs(engine: Engine, prompt: list[int], tag: str) -> Tensor:
    """Return the log-probabilities of the 20 likeliest first tokens, NaN elsewhere: [VOCAB]."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    engine.add(Request(id=tag, prompt=prompt, params=params))
    found = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    (each,) = found[-1].logprobs or []
    row = torch.full((VOCAB,), torch.nan)
    row[each.top_ids] = torch.tensor(each.top_logprobs)
    assert each.top_ids[0] == found[-1].token_ids[0]
    return row


def check(case: Tiny, overrides: Sequence[str]) -> None:
    with engine_of(case, overrides) as engine:
        assert greedy(engine, case.prompts, "cold") == case.tokens
        hits = engine.stats().prefix_hit_tokens
        assert greedy(engine, case.prompts, "warm") == case.tokens
        assert engine.stats().prefix_hit_tokens > hits
        # every prefix asked for alone: what each row of the prompt gives, through chunks and prefix hits
        for index, (prompt, logits) in enumerate(zip(case.prompts, case.logits)):
            for length in range(1, len(prompt), 5):
                found = first_logprobs(engine, prompt[:length], f"row{index}.{length}")
                expected = logits[length - 1].log_softmax(0)
                error = (found - expected).nan_to_num().norm() / logits[length - 1].norm()
                assert error < 1e-4, f"row {length}"


@pytest.mark.parametrize("name", CASES)
def test_references_equal_the_oracle(name: str) -> None:
    check(tiny(name), REFERENCE)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3-bias-window", "gemma2", "gemma3", "llama-wide-heads"])
def test_fused_kernels_equal_the_oracle(name: str) -> None:
    check(tiny(name), FUSED)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3"])
def test_captured_steps_of_two_lowerings_equal_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU does, its kernels and its captures replaced by the CPU's."""
    backend = CapturingBackend()
    monkeypatch.setattr("treadle.runtime.build.open_backend", lambda device, threads: backend)
    # Steps of more than 16 tokens are larger than the largest bucket.
    check(tiny(name), (*FUSED, "scheduler.max_step_tokens=20"))
    assert backend.replayed > 50


def test_programs_with_references_are_not_captured() -> None:
    for overrides, count in ((FUSED, 2), (REFERENCE, 1)):
        made = program(resolved(tiny("llama"), overrides), captures=True)
        assert len(made.lowerings) == count
        assert bool(made.buckets.all) == (count == 2)
        assert len(program(resolved(tiny("llama"), overrides), captures=False).lowerings) == 1


def test_compiled_bodies_equal_the_oracle(tmp_path: Path) -> None:
    check(tiny("llama"), (*SMALL, f"passes.compile_cache={tmp_path}", "passes.quantize=none"))


def test_more_requests_than_pages_are_preempted_and_equal_the_oracle() -> None:
    case = tiny("llama")
    pages = (len(case.prompts[0]) + NEW_TOKENS) // 4 + 6
    small = (*REFERENCE, "model.max_len=64", f"kv.memory={(pages + 1) * 3072}")
    with engine_of(case, small) as engine:
        prompts, tokens = case.prompts[:2] * 2, case.tokens[:2] * 2
        assert greedy(engine, prompts, "tight") == tokens
        assert engine.stats().preemptions > 0
        assert engine.stats().pages_total <= pages


def test_int8_stays_near_the_full_weights() -> None:
    case = tiny("llama")
    rows = []
    for quantize in ("none", "int8"):
        with engine_of(case, ("passes.compile=false", *SMALL, f"passes.quantize={quantize}")) as engine:
            recorder = Recorder(engine)
            greedy(engine, case.prompts[:1], "one", 1)
            rows.append(torch.stack(recorder.rows))
    error = (rows[0] - rows[1]).norm() / rows[0].norm()
    assert 0 < error < 0.05
