"""Logits processors through the whole step loop: what they see and change, and what becomes of those that fail."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch
from history_model import PROMPT, VOCAB, Bench, add, answer, choices, logits_after

from treadle.graph import processors as installed
from treadle.runtime.request import RequestError


class OnlyAfter:
    """Forbids tokens until another one was generated; remembers what it saw."""

    seen: ClassVar[list[list[int]]] = []

    def __init__(self, tokens: list[int], trigger: int) -> None:
        if trigger < 0:
            raise ValueError("trigger is no token")
        self.tokens, self.trigger = tokens, trigger

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(token_ids.tolist())
        return logits.index_fill(0, torch.tensor(self.tokens), -math.inf) if self.trigger not in token_ids else logits


def shift(by: float = 1.0) -> object:
    def add_to_last(token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        logits[token_ids[-1]] += by

    return add_to_last


def break_at(length: int, shape: bool = False) -> object:
    def work(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) < length:
            return logits
        if shape:
            return logits[:3]
        raise KeyError("no such thing")

    return work


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        name: EntryPoint(name, f"{__name__}:{value}", installed.GROUP)
        for name, value in (("only-after", "OnlyAfter"), ("shift", "shift"), ("break", "break_at"))
    }
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.partition(":")[2]])
    monkeypatch.setattr("treadle.runtime.processors.installed_processors", lambda: points)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [64, 11])
def test_processors_see_every_token_of_their_answer(captured: bool, overlap: bool, num_pages: int) -> None:
    OnlyAfter.seen = []
    bench = Bench(
        captured=captured, overlap=overlap, num_pages=num_pages, max_num_seqs=3, max_step_tokens=6, processors=True
    )
    wanted = {"only-after": {"tokens": answer(PROMPT, 9), "trigger": 23}, "shift": {"by": 2.0}}
    bench.add("a", PROMPT, logits_processors=wanted, max_tokens=9, presence_penalty=0.5)
    bench.add("b", PROMPT, max_tokens=9)
    bench.add("c", [*PROMPT, 1], max_tokens=9, logits_processors=["shift"])
    bench.run()

    def expected(prompt: list[int], by: float, forbidden: list[int], presence: float) -> list[int]:
        out: list[int] = []
        for _ in range(9):
            row = logits_after(prompt + out)
            for token in forbidden if 23 not in prompt + out else ():
                row[token] = -math.inf
            row[(prompt + out)[-1]] += by
            out.append(max(range(VOCAB), key=lambda token: row[token] - presence * (token in out)))
        return out

    found = bench.tokens("a")
    assert found == expected(PROMPT, 2.0, answer(PROMPT, 9), 0.5)
    assert bench.tokens("b") == answer(PROMPT, 9)
    assert bench.tokens("c") == expected([*PROMPT, 1], 1.0, [], 0.0)
    assert [tokens for tokens in OnlyAfter.seen if len(tokens) < len(PROMPT) + 9] == [
        PROMPT + found[:index] for index in range(9)
    ]
    bench.close()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_each_answer_of_a_prompt_has_processors_of_its_own(max_tokens: int) -> None:
    OnlyAfter.seen = []
    bench = Bench(processors=True, captured=True)
    wanted = {"only-after": {"tokens": [0, 1], "trigger": 23}}
    params = {"logits_processors": wanted, "max_tokens": max_tokens, "temperature": 1.5}
    names = choices(bench, "r", PROMPT, 3, **params)
    bench.run()
    seen = list(OnlyAfter.seen)
    for index, name in enumerate(names):
        for count in range(max_tokens):
            assert PROMPT + bench.tokens(name)[:count] in seen
        single = Bench(processors=True)
        single.add("x", PROMPT, seed=40 + index, **params)
        assert single.run().tokens("x") == bench.tokens(name)
        single.close()
    bench.close()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("shape", [False, True])
def test_a_processor_that_fails_ends_its_own_request(shape: bool) -> None:
    bench = Bench(processors=True)
    bench.add("bad", PROMPT, logits_processors={"break": {"length": len(PROMPT) + 2, "shape": shape}})
    bench.add("good", PROMPT)
    bench.run()
    assert bench.tokens("good") == answer(PROMPT, 8)
    assert bench.tokens("bad") == answer(PROMPT, 2)
    assert bench.reason("bad") == "error"
    message = "returned logits of shape" if shape else "KeyError: 'no such thing'"
    assert f"logits processor break failed: {'ValueError: ' if shape else ''}{message}" in str(
        bench.outputs["bad"][-1].error
    )
    bench.close()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"logits_processors": ["shitf"]}, "logits_processors", "called 'shitf'; did you mean shift"),
        ({"logits_processors": {"shift": {"bi": 1}}}, "logits_processors", "shift refuses .*unexpected keyword"),
        (
            {"logits_processors": {"only-after": {"tokens": [], "trigger": -1}}},
            "logits_processors",
            "only-after refuses .*trigger is no token",
        ),
        ({"n": 2}, "n", "a request has one answer"),
        ({"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1}, "allowed_token_ids", "min_tokens forbids"),
        ({"allowed_token_ids": [2], "bad": ((2,),)}, "allowed_token_ids", "leaves no token"),
        ({"bad": ((VOCAB, 1),)}, "bad_words", "outside"),
        ({"bad": ((1,) * 9,)}, "bad_words", "2 to 8 tokens"),
    ],
)
def test_what_cannot_run_is_refused(params: dict[str, object], field: str, message: str) -> None:
    bench = Bench(processors=True)
    words = params.pop("bad", ())
    with pytest.raises(RequestError, match=message) as caught:
        add(bench, "a", PROMPT, words, **params)  # type: ignore[arg-type]
    assert caught.value.field == field
    bench.add("b", PROMPT)
    assert bench.run().tokens("b") == answer(PROMPT, 8)
    bench.close()
