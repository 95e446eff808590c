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


def test_an_unknown_path_is_told_the_nearest(server):
    answer = httpx.post(f"{server.url}/v1/chat/completion", json={})
    assert answer.status_code == 404
    message = "there is no POST /v1/chat/completion; did you mean /v1/chat/completions?"
    error = {"message": message, "type": "not_found_error", "param": None, "code": "unknown_url"}
    assert answer.json() == {"error": error}
    # The nearest is one that takes the method: /v1/models does not.
    for path in ("/v1/messages", "/v1/embeddings", "/v1/responses"):
        assert httpx.post(f"{server.url}{path}").json()["error"]["message"] == f"there is no POST {path}"


@pytest.mark.parametrize(
    ("method", "path", "takes", "allow"),
    [
        ("GET", "/v1/completions", "POST", "POST"),
        ("PUT", "/v1/models/fake", "GET", "GET"),
        ("DELETE", "/ping", "GET or POST", "GET, POST"),
        ("HEAD", "/tokenize", "POST", "POST"),
    ],
)
def test_another_method_is_told_the_right_one(server, method, path, takes, allow):
    answer = httpx.request(method, server.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    message = f"{path} takes {takes}, not {method}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "method_not_supported"}
    assert answer.text == "" if method == "HEAD" else answer.json() == {"error": error}


def routes(server, headers) -> list[tuple[str, str]]:
    """Return every (method, path) that a server has, as its own schema lists them."""
    paths = httpx.get(f"{server.url}/openapi.json", headers=headers).json()["paths"]
    return [(method.upper(), path.replace("{name}", "fake")) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("metrics_open", [False, True])
def test_every_route_but_health_asks_for_the_key(start, metrics_open):
    """Crawled, so that a route added later is tried too."""
    server = start(api_key=KEY, metrics_open=metrics_open)
    found = routes(server, {"authorization": f"Bearer {KEY}"})
    assert len(found) == 12
    unknown = ("/openapi.json", "/docs", "/nothing", "//health", "/health/", "/metrics/", "/v1", "/invocations")
    every = [*found, *(("GET", path) for path in unknown)]
    tried = 0
    with httpx.Client(base_url=server.url) as client:
        for path in dict.fromkeys(path for _, path in every):
            if path == "/health" or (path == "/metrics" and metrics_open):
                continue
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
                for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
                    answer = client.request(method, server.url + path, headers=headers)
                    assert answer.status_code == 401, (path, method)
                    tried += 1
    assert tried > 300
    assert httpx.get(f"{server.url}/v1/models").json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == (200 if metrics_open else 401)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        assert client.completions.create(model="fake", prompt="a", max_tokens=2).choices[0].text == "aa"


def test_ping_and_load(start):
    server = start(step_s=0.005)
    assert httpx.get(f"{server.url}/ping").status_code == httpx.post(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    body = {"prompt": "abc", "n": 3, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        pieces = answer.iter_text()
        next(pieces)
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 3}


def test_the_size_of_a_body_is_the_configurations(start):
    server = start(max_body="1KiB")
    for size, status in ((900, 200), (1100, 413)):
        raw = b'{"prompt":"a","max_tokens":1}'.ljust(size)
        assert httpx.post(f"{server.url}/v1/completions", content=raw).status_code == status


def test_requests_that_are_refused_cost_nobody_else_anything(server):
    """A client's mistakes are its own, however many."""
    with httpx.Client(base_url=server.url) as client:
        for i in range(200):
            body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": i}}}}
            assert client.post("/v1/completions", json=body).status_code == 400
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200


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
