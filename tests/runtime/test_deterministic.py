"""passes.deterministic: the bits of an answer do not depend on what runs beside it, is cached, or cut its prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_model import write_model

from treadle.conf.load import compose
from treadle.graph.resolve import resolve
from treadle.runtime.build import build_engine
from treadle.runtime.engine import Engine
from treadle.runtime.request import Request, SamplingParams

VOCAB = 64
PAGE = 4
NEW = 10
# Neither the channels of a head nor those of the MLP are a multiple of a vector's.
SHAPE = ("model.config.head_dim=20", "model.config.intermediate_size=50")

Answer = list[tuple[int, float, tuple[int, ...], tuple[float, ...]]]
"""A token, its log-probability, and the likeliest tokens with theirs."""

KINDS = {
    "float32": ("model.dtype=float32", "passes.quantize=none"),
    "bfloat16": ("model.dtype=bfloat16", "passes.quantize=none"),
    "int8": ("model.dtype=bfloat16", "passes.quantize=int8"),
    "experts": (
        "model.dtype=bfloat16",
        "passes.quantize=none",
        "model.family=mixtral",
        "model.config.num_local_experts=4",
        "model.config.num_experts_per_tok=2",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deterministic")


@contextmanager
def engine_of(folder: Path, kind: str, *overrides: str, pages: int = 600) -> Iterator[Engine]:
    """An engine in the mode, whose tiny random model has logits that are close together."""
    base = [
        "model=hf", f"model.path={write_model(folder / 'model')}", "model.weights=dummy", "hardware=cpu",
        "hardware.threads=1", "passes.deterministic=true", f"passes.compile_cache={folder / 'compiled'}",
        f"kv.page_tokens={PAGE}", "model.max_len=128", "scheduler.max_num_seqs=32", *SHAPE, *KINDS[kind], *overrides,
    ]  # fmt: skip
    page_bytes = resolve(compose(base)).plan.kv.page_bytes
    deployment = compose([*base, f"kv.memory={(pages + 1) * page_bytes}"])
    engine = build_engine(resolve(deployment), lambda phase, done=0, total=0: None)
    try:
        yield engine
    finally:
        engine.close()


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def asked(name: str, prompt: Sequence[int], seed: int | None = None, count: int = NEW) -> Request:
    chance = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed, "top_p": 0.95, "top_k": 40}
    params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=5, **chance)  # type: ignore[arg-type]
    return Request(id=name, prompt=list(prompt), params=params)


def play(
    engine: Engine, requests: Sequence[Request], neighbours: Sequence[Request] = (), seed: int = 0
) -> list[Answer]:
    """Return the answers to ``requests``, each of which, and each neighbour, comes at a random step."""
    rng = random.Random(seed)
    arrivals = sorted(((rng.randrange(12) if neighbours else 0), i) for i in range(len(requests) + len(neighbours)))
    everyone = [*requests, *neighbours]
    answers: dict[str, Answer] = {each.id: [] for each in everyone}
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            engine.add(everyone[arrivals.pop(0)[1]])
        step += 1
        for output in engine.step():
            assert output.error is None
            for token, each in zip(output.token_ids, output.logprobs or [], strict=True):
                answers[output.id].append((token, each.logprob, tuple(each.top_ids), tuple(each.top_logprobs)))
    return [answers[each.id] for each in requests]


def neighbours_of(count: int, tag: str) -> list[Request]:
    rng = random.Random(count)
    return [
        asked(f"{tag}{i}", prompt_of(1000 + count + i, rng.choice([1, 3, 17, 40, 90])), rng.choice([None, i]), 25)
        for i in range(count)
    ]


PROMPTS = [prompt_of(7, 1), prompt_of(8, 37), prompt_of(9, 100)]


def ours(tag: str) -> list[Request]:
    return [asked(f"{tag}{i}", prompt, i if i else None) for i, prompt in enumerate(PROMPTS)]


def alone(engine: Engine, tag: str = "alone") -> list[Answer]:
    return [play(engine, [each])[0] for each in ours(tag)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_same_bits_in_any_company(folder: Path, kind: str) -> None:
    with engine_of(folder, kind) as engine:
        expected = alone(engine)
        assert all(len(answer) == NEW for answer in expected)
        hits = engine.stats().prefix_hit_tokens
        assert alone(engine, "warm") == expected
        assert engine.stats().prefix_hit_tokens > hits
        for count in (1, 7, 31):
            assert play(engine, ours(f"{count}."), neighbours_of(count, f"other{count}."), count) == expected
    tight = ("kv.prefix_cache=false", "scheduler.max_num_seqs=8", "scheduler.max_step_tokens=32")
    with engine_of(folder, kind, *tight, pages=45) as engine:
        assert play(engine, ours("tight"), neighbours_of(7, "other")) == expected
        assert engine.stats().preemptions > 0
    chunked = ("kv.prefix_cache=false", "scheduler.max_num_seqs=4", "scheduler.max_step_tokens=7")
    with engine_of(folder, kind, *chunked) as engine:
        assert alone(engine) == expected


def test_without_the_mode_company_moves_bits(folder: Path) -> None:
    with engine_of(folder, "float32", "passes.deterministic=false", "passes.compile=false") as engine:
        expected = alone(engine)
        assert play(engine, ours("beside"), neighbours_of(7, "other")) != expected


@contextmanager
def engine_on_gpu(folder: Path, model: str, *overrides: str) -> Iterator[Engine]:
    base = [
        f"model={model}", "model.config.num_hidden_layers=3", "model.max_len=4096", "hardware.device=cuda",
        "passes.deterministic=true", f"passes.compile_cache={folder / 'compiled'}", "kv.memory=4GiB", *overrides,
    ]  # fmt: skip
    engine = build_engine(resolve(compose(base)), lambda phase, done=0, total=0: None)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_an_answer_has_the_same_bits_in_any_company_on_a_gpu(folder: Path, model: str, quantize: str) -> None:
    long = [asked("long", [each * 131 % 1000 for each in range(3000)])]
    with engine_on_gpu(folder, model, f"passes.quantize={quantize}") as engine:
        expected, expected_long = alone(engine), play(engine, long)
        assert alone(engine, "warm") == expected
        for count in (1, 7, 31, 255):
            assert play(engine, ours(f"{count}."), neighbours_of(count, f"other{count}."), count) == expected
            assert play(engine, long, neighbours_of(count, f"beside{count}."), count) == expected_long
    for chunk in (512, 7):
        chunked = (
            "kv.prefix_cache=false",
            f"scheduler.max_step_tokens={chunk}",
            f"scheduler.max_num_seqs={min(chunk, 256)}",
        )
        with engine_on_gpu(folder, model, f"passes.quantize={quantize}", *chunked) as engine:
            assert alone(engine) == expected
            assert play(engine, long, neighbours_of(7, "other"), 3) == expected_long
