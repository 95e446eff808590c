"""Engines of the oracle's checkpoints: what they answer must be what transformers answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from oracle import NEW_TOKENS, VOCAB, Tiny
from torch import Tensor

from treadle.conf.load import compose
from treadle.graph.resolve import Resolved, resolve
from treadle.runtime.build import build_engine
from treadle.runtime.engine import Engine
from treadle.runtime.request import Request, SamplingParams, TokenLogprob

DISTINCT = (
    "llama", "llama-mqa", "llama-wide-heads", "llama-longrope", "qwen2-window", "qwen3-bias-window", "gemma2",
    "gemma3-linear", "granite_swa", "cohere2", "olmo2", "exaone4", "apertus", "bitnet", "diffllama",
    "ministral3-window", "phi3-longrope", "stablelm-parallel", "gpt_neox", "falcon-alibi", "bloom-post-residual",
    "mpt-clip", "gpt2-inverse-scale", "gptj", "openai-gpt", "ctrl", "opt-350m", "xglm",
    "mixtral", "qwen3-moe-sparse", "qwen2-moe", "gpt-oss", "dots1", "hy-v3", "mimo-v2-flash", "minimax-m2", "phimoe",
    "dbrx-options", "ernie4-5-moe", "afmoe", "laguna", "cohere2-moe", "llama4-options",
    "deepseek-v2", "deepseek-v3-options", "minicpm3", "deepseek-v32", "glm-moe-dsa", "axk2-groups", "longcat-flash",
    "kimi-linear", "gemma4-shared", "gemma4-moe", "hy-v4-options", "deepseek-v4", "minimax-m3-options",
    "qwen3-next", "qwen3-5-moe-options", "olmo-hybrid-options", "bamba-options", "falcon-h1", "granitemoehybrid",
    "jamba", "mamba", "falcon-mamba", "mamba2", "nemotron-h", "lfm2", "lfm2-moe", "minimax", "inkling",
    "recurrent-gemma", "rwkv",
)  # fmt: skip
"""Every way to attend, to know positions, to sum residuals and to choose experts, each once."""


def resolved(case: Tiny, overrides: Sequence[str]) -> Resolved:
    return resolve(compose(["model=hf", f"model.path={case.path}", "model.dtype=float32", *overrides]))


@contextmanager
def engine_of(case: Tiny, overrides: Sequence[str]) -> Iterator[Engine]:
    engine = build_engine(resolved(case, overrides), lambda phase, done=0, total=0: None)
    # The prompts are shorter than what a checkpoint is made for.
    cache = engine._scheduler.memory.cache
    cache.policy = replace(cache.policy, least_tokens=1)
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


def scored(engine: Engine, prompt: list[int], tag: str) -> list[TokenLogprob]:
    """Return what every token of ``prompt`` scores, with the 20 likeliest in its place."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    engine.add(Request(id=tag, prompt=prompt, params=params))
    found = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    return found[-1].prompt_logprobs or []


def check_next_turn(engine: Engine, case: Tiny, last: int = 4) -> None:
    """Go on from the end of an answer: models with checkpoints have one there, however short the prompt is."""
    begun = greedy(engine, case.prompts, "begun", NEW_TOKENS - last)
    assert begun == [tokens[:-last] for tokens in case.tokens]
    hits = engine.stats().prefix_hit_tokens
    turns = [prompt + answer for prompt, answer in zip(case.prompts, begun)]
    assert greedy(engine, turns, "next", last) == [tokens[-last:] for tokens in case.tokens]
    assert engine.stats().prefix_hit_tokens > hits


def check(case: Tiny, overrides: Sequence[str]) -> None:
    with engine_of(case, overrides) as engine:
        assert greedy(engine, case.prompts, "cold") == case.tokens
        assert greedy(engine, case.prompts, "warm") == case.tokens
        check_next_turn(engine, case)
        # every prefix asked for alone: what each row of the prompt gives, through chunks and prefix hits
        for index, (prompt, logits) in enumerate(zip(case.prompts, case.logits)):
            for length in range(1, len(prompt), 5):
                found = first_logprobs(engine, prompt[:length], f"row{index}.{length}")
                expected = logits[length - 1].log_softmax(0)
                error = (found - expected).nan_to_num().norm() / logits[length - 1].norm()
                assert error < 1e-4, f"row {length}"
            scores = scored(engine, prompt, f"scored{index}")
            assert len(scores) == len(prompt) - 1
            for row, (token, score) in enumerate(zip(prompt[1:], scores)):
                expected = logits[row].log_softmax(0)
                assert abs(score.logprob - expected[token]) < 1e-3, f"token {row + 1}"
                assert max(abs(expected[score.top_ids] - torch.tensor(score.top_logprobs))) < 1e-3, f"token {row + 1}"
