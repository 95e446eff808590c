import pytest

from treadle.serve.openai.requests import ChatRequest

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 512}


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, (0.6, 20, 1.0, 512)),
        ({"temperature": 0.0, "top_k": -1}, (0.0, -1, 1.0, 512)),
        ({"top_p": 0.5, "max_completion_tokens": 9}, (0.6, 20, 0.5, 9)),
        ({"temperature": None, "max_tokens": 7}, (0.6, 20, 1.0, 7)),
    ],
)
def test_a_request_wins_over_what_the_model_recommends(request_fields, expected):
    body = ChatRequest.model_validate({"messages": MESSAGES, **request_fields})
    params = body.sampling(DEFAULTS, max_tokens=body.token_limit, logprobs=None)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == expected
    assert DEFAULTS["max_tokens"] == 512


def test_without_recommendations_the_apis_defaults_hold():
    params = ChatRequest.model_validate({"messages": MESSAGES}).sampling({}, max_tokens=None, logprobs=None)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 1.0, None)
