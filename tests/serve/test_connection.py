from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from treadle.serve import connection
from treadle.serve.connection import MAX_HEAD_BYTES, MAX_HEADERS, Connection

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


def exchange(server, *pieces, until=b"}}"):
    """Return what a server sends until ``until`` or the end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        received = b""
        try:
            for piece in pieces:
                client.sendall(piece)
            while until not in received and (more := client.recv(65536)):
                received += more
        except ConnectionError:
            pass
        return received


def request(max_tokens=2000, stream=True):
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens, "stream": stream}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET /" + b"y" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        GET + b"x: " + b"y" * (8 << 20),
        GET + b"y" * (8 << 20),
        b"".join(b"x%d: y\r\n" % i for i in range(100_000)).join((GET, b"\r\n")),
    ],
    ids=["long header", "many headers", "long address", "endless value", "endless name", "endless headers"],
)
def test_large_heads_are_refused(server, head):
    received = exchange(server, *(head[i : i + 10_000] for i in range(0, len(head), 10_000)))
    # A client that still sends when the server closes may see a reset in place of the answer.
    assert received == b"" or received.startswith(b"HTTP/1.1 431 ")
    if len(head) < 2 * MAX_HEAD_BYTES:
        assert b"32768 bytes and 100 headers" in received


def test_large_trailers_are_refused(server):
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    assert exchange(server, start + b"x: y\r\n" * 200).startswith(b"HTTP/1.1 431 ")


def test_heads_of_usual_size_pass(server):
    headers = {f"x-{i}": "y" * 200 for i in range(90)}
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("line", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_what_is_not_http_is_told_so_in_json(server, line):
    head, _, body = exchange(server, line).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_nothing_is_printed_about_clients(server):
    before = server.output
    exchange(server, b"nonsense\r\n\r\n")
    upgrade = GET + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    assert b"200 OK" in exchange(server, upgrade, until=b"ok")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.output == before


def test_a_pipelining_client_that_leaves_frees_its_slot(start):
    server = start(step_s=0.005)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(request(stream=False) * 3)
        server.wait_gauge("vllm:num_requests_running", 1)
    server.wait_gauge("vllm:num_requests_running", 0, limit_s=1.0)


def test_a_request_behind_another_is_not_read(server):
    received = exchange(server, request(max_tokens=5) + request(max_tokens=5), until=b"never")
    assert received.count(b"[DONE]") == received.count(b"HTTP/1.1") == 1
    received = exchange(server, request(max_tokens=5) + b"nonsense", until=b"never")
    assert received.count(b"[DONE]") == received.count(b"HTTP/1.1") == 1


def test_silent_connections_give_way(start):
    server = start(files=200, slots=2, step_s=0.01)
    with ExitStack() as stack:
        running = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        running.sendall(request(max_tokens=100))
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            time.sleep(0.001)
        for _ in range(5):
            assert httpx.get(f"{server.url}/health").status_code == 200
        received = b""
        while more := running.recv(65536):
            received += more
            if b"[DONE]" in received:
                break
        assert b"[DONE]" in received


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed


def connect(connections, most):
    import uvicorn
    from uvicorn.server import ServerState

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    config = uvicorn.Config(app, http=Connection, limit_concurrency=most, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    state.connections = connections
    made = Connection(config=config, server_state=state, app_state={})
    made.connection_made(Transport())
    return made


def test_a_slow_head_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.1)

    async def run():
        slow, quick = connect(set(), 10), connect(set(), 10)
        quick.data_received(GET + b"\r\n")
        for i in range(10):
            slow.data_received(GET[i : i + 1])
            await asyncio.sleep(0.02)
        quick.connection_lost(None)
        await asyncio.sleep(0.01)
        return slow, quick

    slow, quick = asyncio.run(run())
    assert slow.transport.written.startswith(b"HTTP/1.1 408 ")
    assert slow.transport.closed
    assert not quick.transport.written


def test_only_answered_connections_keep_their_place():
    async def run():
        connections = set()
        made = [connect(connections, 3) for _ in range(3)]
        made[0].data_received(GET + b"\r\n")
        await asyncio.sleep(0.01)
        made[1].data_received(b"GET")
        made += [connect(connections, 3)]
        # The second was heard of last, the first is being answered: the third gives way.
        assert [one.transport.closed for one in made] == [False, False, True, False]
        made[1].data_received(GET[3:] + b"\r\n")
        made[3].data_received(GET + b"\r\n")
        connections.discard(made[2])
        refused = connect(connections, 3)
        assert refused.transport.written.startswith(b"HTTP/1.1 503 ")
        assert refused.transport.closed
        for one in (*made, refused):
            one.connection_lost(None)
        await asyncio.sleep(0.01)

    asyncio.run(run())
