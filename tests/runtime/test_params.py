"""What parameters may be: a refusal names the field at fault and what it takes."""

from __future__ import annotations

import msgspec
import pytest

from treadle.runtime.params import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"max_tokens": -4}, "max_tokens", "max_tokens=-4 is too few; it takes at least 1"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens=-1 is too few; it takes at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens=5 is more than max_tokens=4"),
        ({"min_tokens": -1, "max_tokens": None}, "min_tokens", "min_tokens=-1 is too few"),
        ({"temperature": -0.5}, "temperature", r"temperature=-0.5 is outside \[0, 100\]"),
        ({"temperature": float("nan")}, "temperature", "temperature=nan is outside"),
        ({"top_k": 151937}, "top_k", r"top_k=151937 is outside \[-1, 151936\]"),
        ({"top_p": 0.0}, "top_p", r"top_p=0.0 is outside \(0, 1\]"),
        ({"n": 0}, "n", r"n=0 is outside \[1, 1024\]"),
        ({"presence_penalty": 2.5}, "presence_penalty", r"presence_penalty=2.5 is outside \[-2, 2\]"),
        ({"frequency_penalty": -3}, "frequency_penalty", r"frequency_penalty=-3 is outside \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", r"repetition_penalty=0.0 is outside \(0, 100\]"),
        ({"logprobs": -1}, "logprobs", r"logprobs=-1 is outside \[0, 20\]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", r"prompt_logprobs=21 is outside \[0, 20\]"),
        ({"logprob_token_ids": []}, "logprob_token_ids", "logprob_token_ids is empty; leave it out"),
        ({"logprob_token_ids": range(65)}, "logprob_token_ids", "logprob_token_ids has 65 ids; it takes at most 64"),
        ({"allowed_token_ids": [3, 151936]}, "allowed_token_ids", r"holds 151936, outside \[0, 151936\)"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias", "logit_bias names token -1, outside"),
        ({"logit_bias": {5: 1001.0}}, "logit_bias", r"logit_bias\[5\]=1001.0 is outside \[-1000, 1000\]"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias", r"logit_bias\[5\]=nan is outside"),
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "logit_bias", "has 513 entries; it takes at most 512"),
        ({"bad_words": ["a", " "]}, "bad_words", "one of them is empty"),
        ({"stop": ["x"], "detokenize": False}, "stop", "stop needs detokenize=True"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "it takes at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "neither -1 nor at least 1"),
        ({"seed": 2**63}, "seed", r"seed=\d+ is outside \[-9223372036854775808, 9223372036854775807\]"),
    ],
)
def test_a_value_outside_its_range_names_the_field_and_what_it_takes(given, field, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**given).check(vocab=151936)
    assert caught.value.field == field
    assert "inf" not in str(caught.value)


def test_values_at_their_borders_pass():
    SamplingParams(max_tokens=None, min_tokens=10**6, top_k=-1, temperature=100, min_p=1.0).check(vocab=8)
    SamplingParams(max_tokens=1, min_tokens=1, top_k=8, logprobs=20).check(vocab=8)
    SamplingParams(n=1024, presence_penalty=-2, frequency_penalty=2, repetition_penalty=100, seed=-(2**63)).check(8)
    SamplingParams(logit_bias={7: -1000.0}, allowed_token_ids=[7], truncate_prompt_tokens=-1).check(vocab=8)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"logit_bias": {"5": 1, 6: -2.5}}, {"logit_bias": {5: 1.0, 6: -2.5}}),
        ({"logit_bias": {}}, {}),
        ({"bad_words": "no"}, {"bad_words": ("no",)}),
        ({"allowed_token_ids": {3}}, {"allowed_token_ids": (3,)}),
        ({"logits_processors": ["mine"]}, {"logits_processors": {"mine": {}}}),
        ({"logits_processors": {"mine": {"by": [1, "x"]}}}, {"logits_processors": {"mine": {"by": [1, "x"]}}}),
        ({"logits_processors": []}, {}),
        ({"presence_penalty": None, "n": None, "stop": None, "temperature": None}, {}),
        ({"max_tokens": None}, {"max_tokens": None}),
    ],
)
def test_forms_that_scripts_and_json_bring(given, kept):
    params = SamplingParams(**given).typed()
    assert params == SamplingParams(**kept)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_fields_may_be_set_until_the_parameters_are_handed_over():
    params = SamplingParams()
    params.stop, params.temperature, params.logit_bias = "x", 0, {"5": 1}
    typed = params.typed()
    assert typed == SamplingParams(stop=["x"], temperature=0.0, logit_bias={5: 1.0})
    params.stop = "y"
    assert typed.stop == ("x",)
    with pytest.raises(AttributeError):
        params.topp = 0.5


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {5: "a"}}, "logit_bias"),
        ({"logit_bias": {5.5: 1}}, "logit_bias"),
        ({"logits_processors": [print]}, "logits_processors"),
        ({"bad_words": [3]}, "bad_words"),
        ({"n": 1.5}, "n"),
    ],
)
def test_what_is_of_no_such_type_names_its_field(given, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given).typed()
    assert caught.value.field == field
