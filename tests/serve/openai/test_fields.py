from __future__ import annotations

import pytest

from treadle.serve.errors import ApiError
from treadle.serve.openai.requests import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        (CompletionRequest, "messages", "messages is a field of /v1/chat/completions, not of this route"),
        (ChatRequest, "prompt", "prompt is a field of /v1/completions, not of this route"),
        (ChatRequest, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        # The nearest is refused too, so it is no advice.
        (ChatRequest, "parallel_tool_cals", "unknown field 'parallel_tool_cals'"),
        (CompletionRequest, "mm_processor_kwarg", "unknown field 'mm_processor_kwarg'"),
    ],
)
def test_an_unknown_field_is_told_what_would_be_taken(kind, field, message):
    with pytest.raises(ApiError) as caught:
        kind.refuse_unknown({field: [1]})
    assert (caught.value.message, caught.value.param, caught.value.status) == (message, field, 400)
