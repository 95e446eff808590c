from __future__ import annotations

import json
import re
from functools import partial

import httpx
import openai
import pytest
from tiny_text import tiny_tokenizer

from treadle.conf.schema import ServeConfig
from treadle.runtime.request import SessionHint
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.template import chat_template
from treadle.serve.openai.chat import chat_prompt
from treadle.serve.openai.requests import ChatRequest
from treadle.serve.served import Served

PROMPT = "<user>hi<a>"
"""what the fake's template makes of one user message; its engine repeats it"""


def post(server, **body):
    body = {"messages": [{"role": "user", "content": "hi"}]} | body
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_client(client):
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=26)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "<system>be kind<user>hi<a>"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 26


def test_openai_client_stream(client):
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hé"}]}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "<user>hé<a>"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == 24


def test_an_answer_may_fill_the_context(server):
    answer = post(server).json()
    assert answer["usage"]["total_tokens"] == 2048
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs(server):
    answer = post(server, max_tokens=2, logprobs=True, top_logprobs=2).json()
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "<"
    assert first["bytes"] == [60]
    assert [one["token"] for one in first["top_logprobs"]] == ["<", "="]
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


def test_logprobs_of_split_characters_have_their_bytes(server):
    messages = [{"role": "user", "content": "龘"}]
    text = post(server, messages=messages, max_tokens=9, logprobs=True, stream=True).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
    entries = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "<user>龘"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "<user>龘"


def test_a_turn_that_came_back_is_taken(server):
    turn = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
    answer = post(
        server, messages=messages, max_tokens=1, tools=None, tool_choice="auto", response_format={"type": "text"}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", '"auto"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"n": 0}, "n", "[1, 1024]"),
        ({"n": 100}, "n", "at most 68"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "serve.trust_chat_template=true"),
        ({"documents": [{"text": "x"}]}, "documents", "no place"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"priority": 1}, "priority", "not supported"),
        ({"cache_salt": ""}, "cache_salt", "1 to 512"),
        ({"session_id": 5}, "session_id", "string"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key", "1 to 512"),
        ({"cache_hints": {"demote": True}}, "session_id", "prompt_cache_key"),
        ({"session_id": "s", "cache_hints": True}, "cache_hints", "object"),
        ({"session_id": "s", "cache_hints": {"pin": 5}}, "cache_hints.pin", "pin_s"),
        ({"session_id": "s", "cache_hints": {"pin_s": "5"}}, "cache_hints.pin_s", "number"),
        ({"session_id": "s", "cache_hints": {"pin_s": 3601}}, "cache_hints.pin_s", "[0, 3600]"),
        ({"session_id": "s", "cache_hints": {"pin_s": 5, "demote": True}}, "cache_hints.demote", "pin_s"),
        ({"session_id": "s", "cache_hints": {"prefetch": True}, "n": 2}, "n", "prefetch"),
        ({"kv_hints": {}}, "kv_hints", "cache_hints"),
        ({"return_cached_tokens_details": 1}, "return_cached_tokens_details", "boolean"),
        ({"guided_json": {}}, "guided_json", "not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not supported"),
        ({"request_id": "x" * 201}, "request_id", "200"),
        ({"request_id": "a\r\nx-other: 1"}, "request_id", "ASCII"),
        ({"request_id": "\u65e5", "stream": True}, "request_id", "ASCII"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21 is outside [0, 20]"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "[0, 20]"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "send it beside"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"max_completion_tokens": 4096}, "max_tokens", "2037"),
        ({"max_completion_token": 4}, "max_completion_token", "max_completion_tokens"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "object"),
    ],
)
def test_refusals_name_the_field(server, change, param, words):
    answer = post(server, **change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_the_engine_is_told_of_salt_session_and_where_messages_begin_and_end():
    tokenizer = tiny_tokenizer()
    facts = tokenizer.facts

    def made(messages, *, boundaries=True, **fields):
        served = Served(
            name="m", fingerprint="f", created=0, tokenizer=tokenizer, config=ServeConfig(),
            template=partial(chat_template, facts.chat_templates, facts.template_tokens),
            limits=Limits(max_len=512, vocab=400, boundaries=boundaries),
        )  # fmt: skip
        request = chat_prompt(served, ChatRequest.model_validate({"messages": messages} | fields), "r").request
        return request, [tokenizer.decode(request.prompt[:at], False) for at in request.boundaries]

    system, user, last = ({"role": role, "content": "the dog"} for role in ("system", "user", "user"))
    request, heads = made([system, user, last], cache_salt="t", session_id="s")
    text = tokenizer.decode(request.prompt, False)
    assert (request.cache_salt, request.session) == ("t", SessionHint(id="s"))
    first, second = (at.end() for at in re.finditer("user\n", text))
    assert heads == [text[:first], text[:second], text[: second + len("the dog")]]
    # What comes before the only message is the same in every chat.
    assert made([user])[1] == ["<|im_start|>user\nthe dog"]
    unused, none = made([system, user, last], boundaries=False)
    assert (unused.prompt, none) == (request.prompt, [])
