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
        ({"frequency_penalty": -3}, "frequency_penalty", r"frequency_penalty=-3.0 is outside \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", r"repetition_penalty=0.0 is outside \[0.01, 100\]"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty", r"repetition_penalty=1e-45 is outside"),
        ({"logprobs": -1}, "logprobs", r"logprobs=-1 is outside \[0, 20\]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", r"prompt_logprobs=21 is outside \[0, 20\]"),
        ({"logprob_token_ids": []}, "logprob_token_ids", "logprob_token_ids is empty; leave it out"),
        (
            {"logprob_token_ids": range(65)},
            "logprob_token_ids",
            "logprob_token_ids has 65 entries; it takes at most 64",
        ),
        ({"allowed_token_ids": [3, 151936]}, "allowed_token_ids", r"holds 151936, outside \[0, 151936\)"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias", "logit_bias holds -1, outside"),
        ({"logit_bias": {5: 1001.0}}, "logit_bias", r"logit_bias\[5\]=1001.0 is no number in \[-1000, 1000\]"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias", r"logit_bias\[5\]=nan is no number in"),
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "logit_bias", "has 513 entries; it takes at most 512"),
        ({"bad_words": ["a", " "]}, "bad_words", "one of them is empty"),
        ({"stop": ["x"], "detokenize": False}, "stop", "stop needs detokenize=True"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "neither -1 nor at least 1"),
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
    ("given", "field", "message"),
    [
        ({"temperature": "x"}, "temperature", r"temperature='x', of type str: it takes a number in \[0, 100\]"),
        ({"temperature": True}, "temperature", "temperature=True, of type bool"),
        ({"temperature": 10**400}, "temperature", "of type int: it takes a number"),
        ({"top_p": "0.5"}, "top_p", r"it takes a number in \(0, 1\]"),
        ({"n": 1.5}, "n", r"n=1.5, of type float: it takes a whole number in \[1, 1024\]"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens='5', of type str: it takes a whole number"),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos=1, of type int: it takes True or False"),
        ({"stop": 5}, "stop", "stop=5, of type int: it takes texts"),
        ({"bad_words": [3]}, "bad_words", "bad_words holds 3, of type int: it takes texts"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids holds 'a', of type str: it takes token ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids", "allowed_token_ids=5, of type int: it takes token ids"),
        ({"logit_bias": [1]}, "logit_bias", r"logit_bias=\[1\], of type list"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "which is no token id"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias", "which is no token id"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "which is no token id"),
        ({"logit_bias": {5: "a"}}, "logit_bias", r"logit_bias\[5\]='a' is no number"),
        ({"logit_bias": {5.5: 1}}, "logit_bias", "logit_bias holds 5.5, of type float"),
        ({"logits_processors": [print]}, "logits_processors", "names of installed processors"),
        ({"logits_processors": {"mine": 5}}, "logits_processors", "names of installed processors"),
        ({"logits_processors": {"mine": {"by": 2**64}}}, "logits_processors", "logits_processors: "),
    ],
)
def test_what_is_of_no_such_type_is_refused_at_construction(given, field, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_a_range_that_needs_no_vocabulary_is_checked_at_construction_and_again_when_handed_over():
    with pytest.raises(RequestError, match=r"temperature=-0\.5"):
        SamplingParams(temperature=-0.5)
    params = SamplingParams()
    params.temperature = -0.5
    with pytest.raises(RequestError, match=r"temperature=-0\.5"):
        params.typed()
