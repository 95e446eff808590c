from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest


def post(server, body, path="/v1/completions", **kwargs):
    return httpx.post(f"{server.url}{path}", json=body, **kwargs)


def events(server, body, path="/v1/completions"):
    """Return the parsed events of a stream, whose end must be [DONE]."""
    lines = [line for line in post(server, body | {"stream": True}, path).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_client(client):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.system_fingerprint == "fp_fake"
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_openai_client_stream(client):
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(prompt="abc", model="fake", max_tokens=7, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "abcabca"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_default_is_16_tokens(server):
    assert len(post(server, {"prompt": "a"}).json()["choices"][0]["text"]) == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        ([97, 98], ["aba"]),
        (["ab", "c"], ["aba", "ccc"]),
        ([[97], [98, 99]], ["aaa", "bcb"]),
    ],
)
def test_prompt_shapes(server, prompt, texts):
    body = {"prompt": prompt, "max_tokens": 3}
    assert [choice["text"] for choice in post(server, body).json()["choices"]] == texts
    streamed = [""] * len(texts)
    for event in events(server, body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


def test_stream_never_splits_a_code_point(server):
    text = "👩🏽‍🚀 龘 𝄞 é "
    body = {"prompt": text, "max_tokens": 40}
    whole = post(server, body).json()["choices"][0]["text"]
    pieces = [event["choices"][0]["text"] for event in events(server, body)]
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == whole
    assert whole.startswith(text)


def test_stop_string_over_chunks_never_leaks(server):
    body = {"prompt": "ABC DEFGHIJ and more ", "max_tokens": 100, "stop": ["DEFGHIJ"]}
    got = events(server, body)
    assert "".join(event["choices"][0]["text"] for event in got) == "ABC "
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert got[-1]["choices"][0]["stop_reason"] == "DEFGHIJ"
    answer = post(server, body).json()
    assert answer["choices"][0]["text"] == "ABC "
    assert answer["usage"]["completion_tokens"] == 11


def test_stop_string_with_itself(server):
    body = {"prompt": "one. two. ", "max_tokens": 100, "stop": ".", "include_stop_str_in_output": True}
    assert post(server, body).json()["choices"][0]["text"] == "one."


def test_end_of_sequence(server):
    answer = post(server, {"prompt": [97, 98, 256], "max_tokens": 100}).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_logprobs(server):
    body = {"prompt": "ab", "max_tokens": 3, "logprobs": 2}
    whole = post(server, body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "b", "a"]
    assert whole["token_logprobs"] == [-0.5] * 3
    assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert whole["text_offset"] == [0, 1, 2]
    chunks = [event["choices"][0]["logprobs"] for event in events(server, body)]
    assert [offset for chunk in chunks for offset in chunk["text_offset"]] == [0, 1, 2]
    assert [token for chunk in chunks for token in chunk["tokens"]] == ["a", "b", "a"]


def test_logprobs_cover_text_that_is_held_back(server):
    body = {"prompt": "é!", "max_tokens": 3, "logprobs": 0}
    chunks = [event["choices"][0] for event in events(server, body)]
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert "".join(chunk["text"] for chunk in chunks) == "é!"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_k": 10**30}, "top_k", "258"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "1"),
        ({"max_tokens": 2048}, "max_tokens", "2045"),
        ({"max_tokens": 10**40}, "max_tokens", "2045"),
        ({"min_tokens": 17}, "min_tokens", "16"),
        ({"seed": 2**64}, "seed", "seed"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stop": [""]}, "stop", "16"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "258"),
        ({"n": 1025}, "n", "68"),
        ({"n": True}, "n", "integer"),
        ({"best_of": 2}, "best_of", "1"),
        ({"echo": "yes"}, "echo", "boolean"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "258"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "number"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "[0.01, 100]"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"bad_words": [5]}, "bad_words[0]", "string"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "n", "stream"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "256"),
        ({"prompt": ["x"] * 300}, "prompt", "256"),
        ({"prompt": ["x", 1]}, "prompt[1]", "string"),
        ({"prompt": [1, 258]}, "prompt", "258"),
        ({"prompt": ["x", "y" * 2048]}, "prompt[1]", "2047"),
        ({"prompt": None}, "prompt", "string"),
        ({"prompt": ["x", "y"], "session_id": "s"}, "session_id", "one prompt"),
        ({"prompt_logprobs": 1, "session_id": "s", "cache_hints": {"prefetch": True}}, "prompt_logprobs", "prefetch"),
        ({"prompt": "\x01 refused by the engine"}, None, "the engine refuses this prompt"),
    ],
)
def test_refusals_name_field_and_limit(server, change, param, words):
    answer = post(server, {"prompt": "abc"} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_the_default_answer_is_shortened_where_the_context_ends(server):
    answer = post(server, {"prompt": "a" * 2040}).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert post(server, {"prompt": "a" * 2040, "max_tokens": 16}).json()["error"]["param"] == "max_tokens"


def test_more_prompts_than_the_server_ever_takes_are_the_clients_mistake(server):
    answer = post(server, {"prompt": ["x"] * 69})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "at most 68" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logit_bias": None, "presence_penalty": 0.0},
        {"user": "me", "metadata": {"a": "b"}, "store": True},
        {"seed": 5, "temperature": 0, "top_k": -1, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2},
        {"model": None, "stop": None, "stream": None, "stream_options": None},
    ],
)
def test_harmless_fields(server, change):
    assert post(server, {"prompt": "abc", "model": "fake"} | change).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"null", b'{"prompt": "\\ud800"}', b'{"prompt": "a",}', b"\xff\xfe", b"[" * 100_000],
)
def test_malformed_bodies(server, raw):
    answer = httpx.post(f"{server.url}/v1/completions", content=raw)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_missing_prompt(server):
    assert post(server, {"model": "fake"}).json()["error"]["message"] == "prompt is missing"


def test_body_too_large(server):
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (33 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="'fake'"):
        client.completions.create(model="gpt-5", prompt="x")


def test_long_prompt_is_tokenized_in_a_thread(server):
    answer = post(server, {"prompt": "x" * 10_000})
    assert answer.status_code == 400
    assert "10000 tokens" in answer.json()["error"]["message"]


def test_bad_requests_do_not_disturb_a_stream(start):
    server = start(step_s=0.01)
    body = {"prompt": "A steady stream, é and 龘. ", "max_tokens": 100}
    alone = post(server, body).json()["choices"][0]["text"]

    async def attack(client):
        bodies = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": 0}', b'{"prompt": "\x01"}', b"\x00" * 1000]
        for raw in bodies * 4:
            answer = await client.post(f"{server.url}/v1/completions", content=raw)
            assert answer.status_code == 400

    async def both():
        async with httpx.AsyncClient() as client:
            stream, _ = await asyncio.gather(
                client.post(f"{server.url}/v1/completions", json=body | {"stream": True}), attack(client)
            )
        lines = [line for line in stream.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        parsed = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(event["choices"][0]["text"] for event in parsed)

    assert asyncio.run(both()) == alone


def test_many_ragged_requests_equal_the_same_alone(server):
    bodies = [{"prompt": f"request {i} " * (1 + i % 5), "max_tokens": 5 + 3 * i} for i in range(32)]

    async def run():
        async with httpx.AsyncClient(timeout=60) as client:
            posts = [client.post(f"{server.url}/v1/completions", json=body) for body in bodies]
            return [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*posts)]

    for body, text in zip(bodies, asyncio.run(run())):
        prompt, count = body["prompt"], body["max_tokens"]
        assert text == (prompt * count)[:count]
