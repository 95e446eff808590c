from __future__ import annotations

import pytest

from treadle.runtime.request import SamplingParams, SessionHint
from treadle.serve.errors import ApiError
from treadle.serve.openai.requests import ChatRequest, CompletionRequest

MODEL = {"temperature": 0.3, "top_k": 40, "repetition_penalty": 1.2, "max_tokens": 7}
"""what a checkpoint recommends"""


def params(defaults, **fields) -> SamplingParams:
    body = ChatRequest.model_validate({"messages": []} | fields)
    return body.sampling(defaults, max_tokens=body.token_limit, logprobs=None, prompt_logprobs=body.prompt_logprobs)


def test_a_request_wins_over_the_model_and_the_model_over_nothing():
    assert params({}) == SamplingParams(max_tokens=None)
    found = params(MODEL)
    assert (found.temperature, found.top_k, found.repetition_penalty, found.max_tokens) == (0.3, 40, 1.2, 7)
    found = params(MODEL, temperature=0, max_completion_tokens=9, top_k=-1)
    assert (found.temperature, found.top_k, found.repetition_penalty, found.max_tokens) == (0, -1, 1.2, 9)


def test_every_field_reaches_the_engine():
    given = {
        "n": 2, "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.3, "logit_bias": {"5": 1.5}, "allowed_token_ids": [1, 2],
        "bad_words": ["x"], "logits_processors": {"p": {"a": 1}}, "seed": 4, "stop": ["a"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "prompt_logprobs": 2, "logprob_token_ids": [9],
        "truncate_prompt_tokens": 8, "max_tokens": 6, "skip_reading_prefix_cache": True,
    }  # fmt: skip
    found, expected = params({}, **given), SamplingParams(**given)
    for name in given:
        assert getattr(found, name) == getattr(expected, name) != getattr(SamplingParams(), name), name
    others = set(SamplingParams.__struct_fields__) - given.keys()
    assert others == {"logprobs", "detokenize"}, "a new parameter needs a field, or a reason not to have one"


@pytest.mark.parametrize(
    ("value", "taken"),
    [(None, True), (1, True), (1.0, True), (True, False), (2, False), ("1", False), ([], False), ({}, False)],
)
def test_a_field_without_support_is_taken_where_it_asks_for_nothing(value, taken):
    if taken:
        CompletionRequest.refuse_unknown({"prompt": "x", "best_of": value})
    else:
        with pytest.raises(ApiError, match="best_of is not supported; leave it out or send 1 or null"):
            CompletionRequest.refuse_unknown({"prompt": "x", "best_of": value})


def test_hints_name_their_session():
    def session(**fields):
        return ChatRequest.model_validate({"messages": []} | fields).session

    assert session() is None
    assert session(session_id="a") == session(prompt_cache_key="a") == SessionHint(id="a")
    assert session(session_id="a", prompt_cache_key="b", cache_hints={"pin_s": 5}) == SessionHint(id="a", pin_s=5.0)
    hints = {"pin_s": 2.5, "prefetch": True}
    assert session(prompt_cache_key="b", cache_hints=hints) == SessionHint(id="b", pin_s=2.5, prefetch=True)
    assert session(session_id="a", cache_hints={"demote": True}) == SessionHint(id="a", demote=True)
