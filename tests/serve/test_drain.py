"""What clients are told while a server drains; test_server.py sends the signals."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from treadle.serve.drain import Gate

REFUSED = {
    "error": {"message": "the server is shutting down", "type": "server_error", "param": None, "code": "shutting_down"}
}


def ask(gate: Gate, method: str, path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as client:
            return await client.request(method, path)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("GET", "/health", True),
        ("GET", "/ping", True),
        ("POST", "/ping", True),
        ("POST", "/v1/completions", True),
        ("POST", "/tokenize", True),
        ("GET", "/metrics", False),
        ("GET", "/load", False),
        ("GET", "/v1/models", False),
    ],
)
def test_a_closed_gate_lets_through_who_only_looks(method, path, refused):
    gate = Gate(PlainTextResponse("served"))
    assert ask(gate, method, path).text == "served"
    gate.closed = True
    answer = ask(gate, method, path)
    if not refused:
        assert answer.text == "served"
        return
    assert (answer.status_code, answer.json()) == (503, REFUSED)
    # A pool's next try opens a connection anew, which a load balancer sends elsewhere.
    assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
