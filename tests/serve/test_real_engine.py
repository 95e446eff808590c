"""The whole path: command line, two processes, a tiny model through the reference passes."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

SHARED = "Once upon a time there was a prompt that many requests began with. "


WEIRD = [
    {"response_format": value}
    for value in (
        {},
        [],
        "json",
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": None}}},
        {"type": "regex", "regex": "^(|.*)$"},
        {"type": "text", "json_schema": {}},
    )
] + [{"structured_outputs": {"json": ""}}, {"guided_regex": "(" * 50_000}, {"guided_grammar": "root ::="}]
"""each is one 400, and nothing to anybody else"""


def bodies():
    """32 ragged requests: long and short, some sharing a beginning, some sampled, some with a stop string."""
    found = []
    for i in range(32):
        body = {"prompt": (SHARED if i % 3 == 0 else "") + f"{i} " * (1 + 7 * (i % 5)), "max_tokens": 4 + i % 9 * 4}
        body |= {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i, "top_p": 0.9, "top_k": 50}
        if i % 4 == 1:
            body |= {"stop": ["e", "\x10"], "logprobs": 1}
        found.append(body)
    return found


async def post(client, body):
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return {name: answer.json()["choices"][0][name] for name in ("text", "finish_reason", "stop_reason")}


async def stream(client, body):
    answer = await client.post("/v1/completions", json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def run(server, job):
    async def inside():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await job(client)

    return asyncio.run(inside())


def test_32_concurrent_requests_equal_the_same_alone(real_server):
    async def one_by_one(client):
        return [await post(client, body) for body in bodies()]

    async def together(client):
        return await asyncio.gather(*(post(client, body) for body in bodies()))

    async def together_streamed(client):
        return await asyncio.gather(*(stream(client, body) for body in bodies()))

    alone = run(real_server, one_by_one)
    assert run(real_server, together) == alone
    assert run(real_server, together_streamed) == [answer["text"] for answer in alone]
    assert len({answer["text"] for answer in alone}) > 16


def test_aborts_and_bad_requests_leave_a_stream_as_it_is(real_server):
    body = {"prompt": "A steady stream ", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    async def leave(client, i):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body | {"prompt": f"gone {i} " * 20}, timeout=0.05 * (1 + i % 4))

    async def bad(client):
        for change in ({"n": 0}, {"max_tokens": 5000}, {"prompt": ["x", 5]}, {"prompt": [999]}, *WEIRD):
            assert (await client.post("/v1/completions", json=body | change)).status_code == 400

    async def beside(client):
        found, *_ = await asyncio.gather(stream(client, body), bad(client), *(leave(client, i) for i in range(12)))
        return found

    alone = run(real_server, lambda client: stream(client, body))
    assert run(real_server, beside) == alone
    real_server.wait_gauge("vllm:num_requests_running", 0, limit_s=2.0)
    assert httpx.get(f"{real_server.url}/health").status_code == 200


def test_chat_and_prefix_cache(real_server):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="unused") as client:
        messages = [{"role": "user", "content": "Tell me a long story about a cached prefix, please."}]
        first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0)
        again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0)
        assert again.choices[0].message.content == first.choices[0].message.content
        assert again.usage.prompt_tokens_details.cached_tokens >= 48
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0, stream=True, logprobs=True, top_logprobs=3
        )
        streamed = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in streamed) == first.choices[0].message.content
    entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == 20
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert first.system_fingerprint == httpx.get(f"{real_server.url}/version").json()["fingerprint"]
