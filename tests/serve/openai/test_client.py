"""The real client of OpenAI over every field that the two endpoints take, as whole answers and as streams."""

from __future__ import annotations

import inspect

import openai
import pytest
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions

from treadle.serve.openai.requests import ChatRequest, CompletionRequest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
BOTH = {
    "model": ["fake"],
    "n": [1, 2],
    "max_tokens": [3],
    "temperature": [0, 0.7],
    "top_p": [0.5],
    "top_k": [-1, 5],
    "min_p": [0.1],
    "presence_penalty": [-1.5],
    "frequency_penalty": [1],
    "repetition_penalty": [1.1],
    "logit_bias": [{"97": -5, "98": 1.5}, {}],
    "allowed_token_ids": [[97, 98]],
    "bad_words": [["bad"]],
    "logits_processors": [{}],
    "seed": [-5],
    "stop": ["zz", ["zz", "yy"]],
    "stop_token_ids": [[200]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "min_tokens": [2],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "prompt_logprobs": [0, 2],
    "logprob_token_ids": [[97]],
    "truncate_prompt_tokens": [2, -1],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "add_special_tokens": [False, True],
    "cache_salt": ["tenant"],
    "session_id": ["s"],
    "prompt_cache_key": ["s"],
    "cache_hints": [{"pin_s": 30}, {"demote": True}, {"pin_s": 0.5, "demote": False, "prefetch": False}],
    "skip_reading_prefix_cache": [True],
    "return_cached_tokens_details": [True],
    "request_id": ["mine"],
    "stream": [False],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    "echo": [True],
}
COMPLETION = {"prompt": ["ab", ["ab", "c"], [97, 98], [[97], [98, 99]]], "logprobs": [0, 2]}
CHAT = {
    "messages": [MESSAGES],
    "max_completion_tokens": [3],
    "logprobs": [True],
    "top_logprobs": [2],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template": [],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[]],
}
HINTS = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}
WITHOUT_STREAM = ("prompt_logprobs", "stream")
NEEDS = {
    "top_logprobs": {"logprobs": True},
    "cache_hints": {"session_id": "s"},
    "continue_final_message": {"add_generation_prompt": False},
    "return_tokens_as_token_ids": {"logprobs": 1},
}
"""fields that mean something beside another one only"""


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_no_field_is_left_out():
    assert {*BOTH, *COMPLETION} == set(CompletionRequest.model_fields)
    assert {*BOTH, *CHAT} == set(ChatRequest.model_fields)


def call(client, chat: bool, fields):
    """Send a request through the client; what its method has no argument for goes into the body beside."""
    method = client.chat.completions.create if chat else client.completions.create
    named = inspect.signature(Chats.create if chat else Completions.create).parameters
    base = {"model": "fake", "max_tokens": 4} | ({"messages": MESSAGES} if chat else {"prompt": "ab"})
    base |= fields
    extra = {name: value for name, value in base.items() if name not in named}
    return method(**{name: value for name, value in base.items() if name in named}, extra_body=extra)


def cases(endpoint):
    fields = BOTH | (CHAT if endpoint == "chat" else COMPLETION) | {name: [value] for name, value in HINTS.items()}
    for name, values in fields.items():
        for value in values:
            if endpoint == "completions" and name in ("metadata", "store", "service_tier", "safety_identifier"):
                continue
            yield pytest.param(endpoint == "chat", name, value, id=f"{endpoint}-{name}-{str(value)[:20]}")


@pytest.mark.parametrize(("chat", "name", "value"), [*cases("completions"), *cases("chat")])
def test_every_field_is_taken(client, chat, name, value):
    beside = NEEDS.get(name, {})
    if name == "session_id":
        beside = {"cache_hints": {"pin_s": 5}}
    if name == "return_tokens_as_token_ids" and chat:
        beside = {"logprobs": True}
    if name == "continue_final_message":
        beside = beside | {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]}
    fields = beside | {name: value}
    whole = None
    if name != "stream_options":
        whole = call(client, chat, fields)
        assert whole.usage.completion_tokens > 0
        assert all(choice.finish_reason == "length" for choice in whole.choices)
    if name in WITHOUT_STREAM:
        return
    chunks = list(call(client, chat, fields | {"stream": True}))
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    if whole is None:
        assert chunks[-1].usage.completion_tokens == 4
        return
    assert len(ends) == len(whole.choices)
    texts = [""] * len(whole.choices)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
    assert texts == [choice.message.content if chat else choice.text for choice in whole.choices]


def test_usage_of_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(call(client, False, {"prompt": "abc", "stream": True, "stream_options": options}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {3}
    assert {chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks} == {3}


def test_several_answers_to_each_of_several_prompts(client):
    whole = call(client, False, {"prompt": ["ab", "c"], "n": 3})
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == ["abab"] * 3 + ["cccc"] * 3
    assert whole.usage.prompt_tokens == 3
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens_details.cached_tokens == 3


def test_the_fields_of_a_whole_chat_completion(client):
    answer = call(client, True, {"logprobs": True, "top_logprobs": 2, "request_id": "mine", "return_token_ids": True})
    assert answer.id == "chatcmpl-mine"
    assert answer._request_id == "mine"
    assert answer.object == "chat.completion"
    assert answer.created > 1_700_000_000
    assert answer.system_fingerprint == "fp_fake"
    assert answer.service_tier is None
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "<sys", None)
    entry = choice.logprobs.content[0]
    assert (entry.token, entry.bytes, entry.logprob) == ("<", [60], -0.5)
    assert [(one.token, one.bytes) for one in entry.top_logprobs] == [("<", [60]), ("=", [61])]
    assert bytes(answer.prompt_token_ids).decode() == "<system>Be brief.<user>hi<a>"
    assert choice.token_ids == list(b"<sys")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


def test_token_ids_in_streams(client):
    chunks = list(call(client, True, {"stream": True, "return_token_ids": True}))
    assert bytes(chunks[0].prompt_token_ids).decode().startswith("<system>")
    assert [i for chunk in chunks[1:] for i in chunk.choices[0].token_ids] == list(b"<sys")
    chunks = list(call(client, False, {"stream": True, "return_token_ids": True}))
    assert chunks[0].choices[0].prompt_token_ids == [97, 98]
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == list(b"abab")
    # Also of tokens whose text waits for the rest of a letter.
    chunks = list(call(client, False, {"stream": True, "return_token_ids": True, "prompt": "\u00e9"}))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == list("\u00e9\u00e9".encode())


def test_echo_with_log_probabilities_covers_the_prompt(client):
    """What evaluation harnesses send: how likely was this text?"""
    for fields in ({"max_tokens": 1}, {"max_tokens": 0}):
        choice = call(client, False, {"prompt": "abc", "echo": True, "logprobs": 1} | fields).choices[0]
        generated = fields["max_tokens"]
        assert choice.text == "abc" + "a" * generated
        assert choice.logprobs.tokens == ["a", "b", "c"] + ["a"] * generated
        assert choice.logprobs.token_logprobs == [None, -0.25, -0.5] + [-0.5] * generated
        assert choice.logprobs.top_logprobs == [None, {"b": -0.25}, {"c": -0.5}] + [{"a": -0.5}] * generated
        assert choice.logprobs.text_offset == list(range(3 + generated))
        assert choice.finish_reason == "length"


def test_only_an_echo_counts_no_tokens(client):
    fields = {"prompt": ["abc", "de"], "echo": True, "logprobs": 0, "max_tokens": 0}
    whole = call(client, False, fields)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 0)
    chunks = list(call(client, False, fields | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1].usage.completion_tokens == 0
    streamed = sorted((chunk.choices[0] for chunk in chunks[:-1]), key=lambda choice: choice.index)
    assert [choice.text for choice in streamed] == ["abc", "de"]
    assert [choice.logprobs.token_logprobs for choice in streamed] == [
        choice.logprobs.token_logprobs for choice in whole.choices
    ]
    assert {choice.finish_reason for choice in streamed} == {"length"}


def test_streamed_echo_has_the_whole_answers_log_probabilities(client):
    fields = {"prompt": "abc", "echo": True, "logprobs": 2}
    whole = call(client, False, fields).choices[0].logprobs
    chunks = [chunk.choices[0] for chunk in call(client, False, fields | {"stream": True})]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for chunk in chunks for value in getattr(chunk.logprobs, name)]
        assert joined == getattr(whole, name)


def test_log_probabilities_of_prompts(client):
    one = {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}
    choices = call(client, False, {"prompt": "ab", "prompt_logprobs": 1, "n": 2}).choices
    assert [choice.prompt_logprobs for choice in choices] == [[None, one]] * 2
    answer = call(client, True, {"prompt_logprobs": 0})
    assert answer.prompt_logprobs[0] is None
    assert [next(iter(entry.values()))["decoded_token"] for entry in answer.prompt_logprobs[1:3]] == ["s", "y"]


def test_tokens_called_by_their_ids(client):
    choice = call(client, False, {"logprobs": 1, "return_tokens_as_token_ids": True}).choices[0]
    assert choice.logprobs.tokens[0] == "token_id:97"
    assert list(choice.logprobs.top_logprobs[0]) == ["token_id:97"]


def test_a_final_message_is_continued_and_echoed(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 80}
    text = "<system>Be brief.<user>hi<assistant>The answer is"
    assert call(client, True, fields).choices[0].message.content == (text * 2)[:80]
    fields |= {"echo": True}
    whole = call(client, True, fields).choices[0].message.content
    assert whole == "The answer is" + (text * 2)[:80]
    chunks = call(client, True, fields | {"stream": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_template_of_the_request_is_taken_where_the_server_trusts_it(start):
    server = start(trust_chat_template=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ messages[-1].content }}{{ mood }}"
        fields = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}, "max_tokens": 7}
        assert call(client, True, fields).choices[0].message.content == "hi!hi!h"
        fields |= {"documents": [{"text": "fact"}]}
        assert call(client, True, fields).choices[0].message.content == "[fact]h"
        with pytest.raises(openai.BadRequestError, match="not valid Jinja"):
            call(client, True, {"chat_template": "{% for"})
        # The sandbox: no way to Python's own objects.
        attack = "{{ ().__class__.__base__.__subclasses__() }}"
        with pytest.raises(openai.BadRequestError, match="refuses these messages"):
            call(client, True, {"chat_template": attack})


def test_roles_are_the_templates_to_allow(client):
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    answer = call(client, True, {"messages": messages, "max_tokens": 38})
    assert answer.choices[0].message.content == "<system>d<user>u<assistant>a<tool>t<a>"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
def test_parts_that_are_not_text_are_refused_by_name(client, kind):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match=kind) as caught:
        call(client, True, {"messages": messages})
    assert caught.value.param == "messages[0].content[1].type"
    assert caught.value.type == "invalid_request_error"


def test_two_clients_with_one_request_id_do_not_meet(start):
    server = start(step_s=0.005)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        first = call(client, False, {"prompt": "ab", "max_tokens": 30, "request_id": "same", "stream": True})
        begun = next(first).choices[0].text
        second = call(client, False, {"prompt": "xyz", "max_tokens": 6, "request_id": "same"})
        assert second.choices[0].text == "xyzxyz"
        assert begun + "".join(chunk.choices[0].text for chunk in first) == "ab" * 15


def test_an_error_in_a_stream_is_openais(start):
    server = start(step_s=0.005, drain_s=0.1)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = call(client, False, {"max_tokens": 2000, "stream": True})
        next(stream)
        server.process.terminate()
        with pytest.raises(openai.APIError, match="shutting down") as caught:
            list(stream)
    assert caught.value.body["type"] == "server_error"
