from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import httpx
import openai
import pytest

KEY = "s3cret"


def test_models(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_health_and_version(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/version").json()["fingerprint"] == "fp_fake"


def test_unknown_path_and_method(server):
    answer = httpx.post(f"{server.url}/v1/chat/completion", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions?" in answer.json()["error"]["message"]
    answer = httpx.get(f"{server.url}/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["allow"] == "POST"


def test_every_path_but_health_asks_for_the_key(start):
    server = start(api_key=KEY)
    for path in (
        "/v1/models",
        "/v1/completions",
        "/metrics",
        "/version",
        "/openapi.json",
        "/docs",
        "/nothing",
        "//health",
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for method in ("GET", "POST", "OPTIONS"):
                answer = httpx.request(method, server.url + path, headers=headers)
                assert answer.status_code == 401, (path, method)
                assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{server.url}/health").status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        assert client.completions.create(model="fake", prompt="a", max_tokens=2).choices[0].text == "aa"


def test_counters_equal_what_clients_saw(start):
    server = start()
    prompt = completion = 0
    with httpx.Client(base_url=server.url) as client:
        for i in range(30):
            body = {"prompt": "abcd"[: 1 + i % 4], "max_tokens": 1 + i, "stop": ["x" if i % 2 else "b"]}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            prompt += usage["prompt_tokens"]
            completion += usage["completion_tokens"]
    assert server.gauge("vllm:prompt_tokens_total") == prompt
    assert server.gauge("vllm:generation_tokens_total") == completion
    assert server.gauge("vllm:request_success_total") == 30
    assert server.gauge("vllm:time_to_first_token_seconds_count") == 30


def test_a_full_queue_answers_429(start):
    server = start(slots=2, max_queue=1, step_s=0.02)

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            body = {"prompt": "a", "max_tokens": 40}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))
            after = await client.post("/v1/completions", json=body)
            return answers, after

    answers, after = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 3
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "limit is 3" in refused.json()["error"]["message"]
    assert after.status_code == 200
    assert server.gauge("treadle:requests_refused_total") == 3


def test_50_streams_closed_at_the_third_token_free_their_slots(start):
    server = start(slots=20, step_s=0.005)
    body = b'{"prompt": "abc", "max_tokens": 2000, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with ExitStack() as open_sockets:
        port = server.port
        sockets = [open_sockets.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(50)]
        for connection in sockets:
            connection.sendall(head + body)
        # The first 20 run; the other 30 are still in the queue when their clients go.
        for connection in sockets[:20]:
            received = b""
            while received.count(b'"text"') < 3:
                received += connection.recv(65536)
        server.wait_gauge("vllm:num_requests_running", 20)
        server.wait_gauge("vllm:num_requests_waiting", 30)
    server.wait_gauge("vllm:num_requests_running", 0, limit_s=1.0)
    server.wait_gauge("vllm:num_requests_waiting", 0, limit_s=0.5)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "next ", "max_tokens": 9})
    assert answer.json()["choices"][0]["text"] == "next next"
    assert server.gauge("vllm:request_success_total") == 51


def test_a_client_that_leaves_without_a_stream_frees_its_slot(start):
    server = start(step_s=0.005)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2000}, timeout=0.3)
    server.wait_gauge("vllm:num_requests_running", 0, limit_s=1.0)


def test_a_client_that_leaves_inside_its_body_is_forgotten(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "Traceback" not in server.output
