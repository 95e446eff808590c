"""Fields that change tokens, through the whole path: HTTP, two processes, a tiny model of bytes."""

from __future__ import annotations

import httpx
import pytest

PROMPT = "A tiny prompt of bytes"


@pytest.fixture(scope="module")
def ask(real_server):
    """Return a function that sends a completion and returns its answer."""
    with httpx.Client(base_url=real_server.url, timeout=120) as client:

        def send(**fields):
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True} | fields
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield send


def tokens(answer, i: int = 0) -> list[int]:
    return answer["choices"][i]["token_ids"]


def test_the_answers_of_n_are_those_of_seeds_in_a_row(ask):
    hot = {"temperature": 1.0, "seed": 7}
    three = ask(n=3, **hot)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    alone = [tokens(ask(**hot | {"seed": 7 + i})) for i in range(3)]
    assert [tokens(three, i) for i in range(3)] == alone
    assert len(set(map(tuple, alone))) == 3
    assert three["usage"]["prompt_tokens"] == len(PROMPT)
    assert three["usage"]["completion_tokens"] == 36


def test_biases_masks_and_bad_words(ask):
    first = tokens(ask())[0]
    assert set(tokens(ask(allowed_token_ids=[65, 66]))) <= {65, 66}
    assert set(tokens(ask(logit_bias={"90": 1000}))) == {90}
    assert first not in tokens(ask(logit_bias={str(first): -1000}))
    free = ask(allowed_token_ids=[65, 66, 67])["choices"][0]["text"]
    assert free[:2] not in ask(allowed_token_ids=[65, 66, 67], bad_words=[free[:2]])["choices"][0]["text"]


def test_penalties(ask):
    few = {"allowed_token_ids": [65, 66, 67, 68], "max_tokens": 4}
    assert len(set(tokens(ask(logit_bias={"65": 0.0}, presence_penalty=2.0, frequency_penalty=2.0, **few)))) >= 3
    plain, kept = tokens(ask(max_tokens=30)), tokens(ask(max_tokens=30, repetition_penalty=50.0))
    assert len(set(kept)) > len(set(plain))
    assert tokens(ask(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)) == tokens(ask())


def test_echo_scores_the_prompt_as_generation_scored_it(ask):
    answer = ask(logprobs=3)
    generated, chosen = tokens(answer), answer["choices"][0]["logprobs"]["token_logprobs"]
    whole = [*PROMPT.encode(), *generated]
    scored = ask(prompt=whole, echo=True, logprobs=1, max_tokens=0)
    found = scored["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][len(PROMPT) :] == pytest.approx(chosen, abs=1e-4)
    greedy = zip(found["top_logprobs"][len(PROMPT) :], found["tokens"][len(PROMPT) :], strict=True)
    assert all(max(top, key=top.get) == token for top, token in greedy)
    assert scored["usage"]["completion_tokens"] == 0
    assert len(found["tokens"]) == len(whole)
    again = ask(prompt=whole, prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    pairs = zip(again[1:], whole[1:], found["token_logprobs"][1:], strict=True)
    assert all(entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4) for entry, token, logprob in pairs)


def test_prompts_are_shortened_from_the_left(ask):
    answer = ask(truncate_prompt_tokens=5, echo=True)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["choices"][0]["text"].startswith(PROMPT[-5:])
    assert tokens(answer) == tokens(ask(prompt=PROMPT[-5:]))


def test_tokens_that_end_an_answer(ask):
    third = tokens(ask())[2]
    answer = ask(stop_token_ids=[third])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == third
    assert len(tokens(ask(stop_token_ids=[third], min_tokens=10))) >= 10
