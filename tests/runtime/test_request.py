"""What parameters may be: a refusal names the field at fault and what it takes."""

from __future__ import annotations

import pytest

from treadle.runtime.request import RequestError, SamplingParams


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
