"""On a CUDA device, every fast path on: families equal their oracles, load disturbs nobody, memory stays as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from oracle import CASES, NEW_TOKENS, VOCAB, Tiny, tiny
from oracle_engine import check, engine_of, greedy, resolved

from treadle.conf.load import compose
from treadle.graph.resolve import resolve
from treadle.runtime.build import build_engine
from treadle.runtime.engine import Engine
from treadle.runtime.request import Abort, Request, SamplingParams, spread

pytestmark = pytest.mark.gpu

CUDA = ("hardware.device=cuda", "hardware.memory=auto", "kv.page_tokens=4", "kv.memory=4MiB")
# Steps of more than 16 tokens are larger than any bucket, smaller ones are captured.
LIMITS = ("scheduler.max_num_seqs=4", "scheduler.max_step_tokens=20")
FUSED = ("passes.compile=false", *CUDA, *LIMITS)
# One thread: where tests run side by side, threads that wait for each other take the cores from those that compute.
CPU = ("hardware=cpu", "hardware.threads=1", "passes.compile=false", "passes.quantize=none")


REFUSED = {"deepseek_v4"}
"""Families that a GPU has no kernels for (tests/passes/test_choose_kernels.py)."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model_type not in REFUSED])
def test_kernels_equal_the_oracle(name: str) -> None:
    check(tiny(name), FUSED)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_references_equal_the_oracle(name: str) -> None:
    check(tiny(name), ("passes=reference", *CUDA, *LIMITS))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3-moe", "cohere2", "qwen3-next", "deepseek-v3"])
def test_compiled_bodies_equal_the_oracle(name: str, tmp_path: Path) -> None:
    check(tiny(name), (*CUDA, *LIMITS, f"passes.compile_cache={tmp_path}"))


def random_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(longest // 2)]
    return [
        stem[: rng.randrange(len(stem))] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest // 2))]
        for _ in range(count)
    ]


def alone(case: Tiny, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the answers of the CPU, one request at a time."""
    with engine_of(case, CPU) as engine:
        return [greedy(engine, [prompt], f"alone{index}.")[0] for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-bias-window", "mixtral", "bloom", "qwen3-next", "lfm2"])
def test_load_in_scattered_pages_changes_no_answer(name: str) -> None:
    """Ragged lengths, shared beginnings, preemptions and aborts, over pages in random order."""
    case, prompts = tiny(name), random_prompts(40, 60)
    expected = alone(case, prompts)
    state = resolved(case, FUSED).plan.state
    # Tight: pages for some of the sequences, and little more for windows, a step's tokens included.
    pages = 60 if len(state.groups) == 1 else 75
    size = (pages + 1) * state.full.page_bytes
    size += 12 * state.block.block_bytes if state.block is not None else 0
    tight = (*CUDA[:-1], f"kv.memory={size}")
    limits = ("passes.compile=false", "model.max_len=96", "scheduler.max_num_seqs=8", "scheduler.max_step_tokens=64")
    rng = random.Random(5)
    with engine_of(case, (*tight, *limits)) as engine:
        rng.shuffle(engine._scheduler.memory.arena._free)
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            engine.add(Request(id=str(index), prompt=prompt, params=params))
        aborted = set[str]()
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.token_ids)
            victim = str(rng.randrange(len(prompts)))
            if rng.random() < 0.05 and victim in engine._sequences:
                aborted.add(victim)
                engine.abort(Abort(id=victim))
        # Who has windows gives pages back while it grows: whoever was let in then fits.
        assert engine.stats().preemptions > 0 or len(state.groups) > 1
        assert engine.stats().prefix_hit_tokens > 0 or state.needs_checkpoints
    assert aborted
    for index, tokens in enumerate(expected):
        answer = found[str(index)]
        assert answer == (tokens[: len(answer)] if str(index) in aborted else tokens), f"request {index}"


CHANGES: tuple[dict[str, object], ...] = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.75, "repetition_penalty": 1.4},
    {"logit_bias": {7: 2.5, 3: -4.0, 11: 1.0}},
    {"allowed_token_ids": list(range(3, VOCAB, 3)), "presence_penalty": 0.5},
    {"logprobs": 3, "logprob_token_ids": [5, 6], "frequency_penalty": 1.0},
    {"temperature": 0.9, "seed": 5, "n": 3, "repetition_penalty": 1.2},
    {"prompt_logprobs": 2, "presence_penalty": 1.0},
    {},
)


def changed(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of every prompt under every change, all together."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for index, prompt in enumerate(prompts):
        for number, change in enumerate(CHANGES):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **change})
            words = ((8,), (9, 4), (4, 9)) if number % 2 else ()
            request = Request(id=f"{index}.{number}", prompt=prompt, params=params, bad_token_ids=words)
            for each in spread(request):
                found[each.id] = ([], [])
                engine.add(each)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens, logprobs = found[output.id]
            tokens += output.token_ids
            for entry in (*(output.prompt_logprobs or ()), *(output.logprobs or ())):
                logprobs += [entry.logprob, *entry.top_logprobs, *entry.asked_logprobs]
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_all_that_changes_logits_equals_the_cpu(name: str) -> None:
    case = tiny(name)
    with engine_of(case, CPU) as engine:
        expected = changed(engine, case.prompts)
    with engine_of(case, FUSED) as engine:
        found = changed(engine, case.prompts)
    for request, (tokens, logprobs) in expected.items():
        assert found[request][0] == tokens, request
        assert found[request][1] == pytest.approx(logprobs, abs=1e-3)


@contextmanager
def larger_engine() -> Iterator[Engine]:
    """An engine whose steps are large enough to be of every kind, in bfloat16."""
    shape = ("model=qwen3-0.6b", "model.config.num_hidden_layers=4", "model.max_len=4096")
    limits = ("hardware.device=cuda", "kv.memory=1GiB", "scheduler.max_num_seqs=64")
    deployment = compose([*shape, *limits])
    engine = build_engine(resolve(deployment), lambda phase, done=0, total=0: None)
    try:
        yield engine
    finally:
        engine.close()


def load(engine: Engine, rounds: int) -> None:
    """Run as many long and short requests as may run together, with everything that sampling can be asked for."""
    rng = random.Random(7)
    for index in range(rounds):
        length = rng.choice([1, 5, 40, 500, 3000])
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 50]), top_p=rng.choice([1.0, 0.9]),
            logprobs=rng.choice([None, 20]), max_tokens=rng.randrange(1, 60), ignore_eos=True,
            presence_penalty=rng.choice([0.0, 1.0]), logit_bias=rng.choice([None, {5: 1.0}]),
            prompt_logprobs=rng.choice([None, None, None, 20]), allowed_token_ids=rng.choice([None, range(5, 9000)]),
        )  # fmt: skip
        engine.add(Request(id=str(index), prompt=[rng.randrange(32000) for _ in range(length)], params=params))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None


def test_memory_does_not_grow_under_the_largest_load() -> None:
    with larger_engine() as engine:
        reserved = torch.cuda.memory_reserved()
        load(engine, 200)
        assert torch.cuda.memory_reserved() == reserved


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    with larger_engine() as engine:
        params = SamplingParams(temperature=1.0, top_p=0.95, top_k=100, seed=11, max_tokens=8, ignore_eos=True)
        answers = []
        for tag in ("first", "again"):
            engine.add(Request(id=tag, prompt=[1, 2, 3], params=params))
            tokens = list[int]()
            while engine.has_work:
                tokens += [token for output in engine.step() for token in output.token_ids]
            answers.append(tokens)
        assert len(answers[0]) == 8
        assert answers[0] == answers[1]
