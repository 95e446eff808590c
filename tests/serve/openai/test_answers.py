"""What usage says of the prefix cache, and what a session's hints do to an answer, through OpenAI's client."""

from __future__ import annotations

import openai
import pytest

DETAILS = {"return_cached_tokens_details": True}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def call(client, chat: bool, extra, **fields):
    """Send a request whose ``extra`` fields the client has no arguments for."""
    method = client.chat.completions.create if chat else client.completions.create
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "abcdefgh"}
    return method(model="fake", max_tokens=4, extra_body=extra, **prompt, **fields)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({}, {"cold": -4, "below_granularity": 1}),
        # Whether the cache knows a prompt under another salt is nobody's business.
        ({"cache_salt": "tenant"}, {"cold": -3}),
        ({"skip_reading_prefix_cache": True}, {"opted_out": 0}),
    ],
)
def test_usage_says_where_cached_tokens_were_and_why_others_were_not(client, chat, fields, missed):
    whole = call(client, chat, fields | DETAILS).usage
    details = whole.prompt_tokens_details
    assert details.cached_tokens == 3
    assert details.cached_tokens_details == {"device": 2, "host": 1}
    reason = next(iter(missed))
    assert details.uncached_tokens_details == missed | {reason: whole.prompt_tokens + missed[reason]}
    chunks = [*call(client, chat, fields | DETAILS, stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].usage.model_dump() == whole.model_dump()
    plain = call(client, chat, fields).usage.prompt_tokens_details.model_dump()
    assert plain["cached_tokens"] == 3
    assert not {"cached_tokens_details", "uncached_tokens_details"} & plain.keys()


def test_details_of_several_prompts_are_added_up(client):
    whole = client.completions.create(
        model="fake", prompt=["abcdefgh", "ijklmn"], n=2, max_tokens=2, extra_body=DETAILS
    )
    details = whole.usage.prompt_tokens_details
    assert details.cached_tokens_details == {"device": 4, "host": 2}
    assert details.uncached_tokens_details == {"cold": 6, "below_granularity": 2}


@pytest.mark.parametrize("chat", [True, False])
def test_a_prefetch_generates_nothing(client, chat):
    hints = {"session_id": "s", "cache_hints": {"prefetch": True, "pin_s": 20}}
    whole = call(client, chat, hints)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert (choice.message.content if chat else choice.text) == ""
    assert whole.usage.completion_tokens == 0
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    chunks = [*call(client, chat, hints, stream=True)]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_hints_reach_the_engine(start):
    server = start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        for hints in ({"pin_s": 5}, {"pin_s": 5, "prefetch": True}, {"demote": True}, {"prefetch": True}, {}):
            call(client, True, {"cache_hints": hints}, prompt_cache_key="s")
    # The step loop's numbers come a moment behind its answers.
    server.wait_gauge("treadle:session_hints_total", 5)
    text = server.metrics()
    for hint, count in {"pin": 2, "demote": 1, "prefetch": 2}.items():
        assert f'treadle:session_hints_total{{hint="{hint}",model_name="fake"}} {count}.0' in text
