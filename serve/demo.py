"""``make demo``: start a server, stream one answer from it, say how fast it was, and stop it. Over HTTP only."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

PROMPT = "Explain in three short sentences why the sky is blue."
MAX_TOKENS = 160
_HOST = "127.0.0.1"
_START_LIMIT_S = 900.0
_STOP_LIMIT_S = 40.0


@dataclass(frozen=True)
class Answer:
    """What came back: tokens, seconds to the first text, and seconds from there to the last."""

    num_tokens: int
    first_s: float
    rest_s: float


def main(overrides: Sequence[str]) -> int:
    """Run the demonstration on the deployment that ``overrides`` describe. Returns the exit code."""
    console = Console(highlight=False)
    begin = time.monotonic()
    port = _free_port()
    command = [
        sys.executable,
        "-P",
        "-m",
        "treadle.serve",
        "serve",
        *overrides,
        f"serve.host={_HOST}",
        f"serve.port={port}",
    ]
    with _running(command) as server:
        if not _wait_until_ready(server, port):
            code = server.poll()
            console.print(f"[bold red]the server did not start[/] (exit code {code})")
            return code or 1
        console.print(f"ready after {time.monotonic() - begin:.1f} s\n\n[bold]> {PROMPT}[/]\n")
        model = _models(port)[0]
        answer = _ask(console, port, model)
        rate = (answer.num_tokens - 1) / max(answer.rest_s, 1e-9)
        first_ms = answer.first_s * 1000
        speed = f"{answer.num_tokens} tokens, first after {first_ms:.0f} ms, then {rate:.1f} tokens/s"
        console.print(f"\n[green]{speed}[/]\n")
        console.print("Start the server with [cyan].venv/bin/treadle serve[/] and try next:\n")
        console.print(_curl(model), style="cyan", markup=False, soft_wrap=True)
    return 0


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server while the block lasts; then ask it to drain, as SIGTERM does."""
    server = subprocess.Popen(command)
    try:
        yield server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if _get(port, "/health")[0] == 200:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _ask(console: Console, port: int, model: str) -> Answer:
    """Stream the answer to the terminal as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.monotonic()
    first = last = 0.0
    num_tokens = 0
    for event in _events(port, body):
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                last = time.monotonic()
                first = first or last
                console.print(text, end="", markup=False, soft_wrap=True)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    console.print()
    return Answer(num_tokens, first - begin, last - first)


def _events(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection(_HOST, port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()}")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            break
        if data:
            yield json.loads(data)
    connection.close()


def _models(port: int) -> list[str]:
    return [model["id"] for model in json.loads(_get(port, "/v1/models")[1])["data"]]


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def _curl(model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Name three rivers."}], "stream": True})
    return f"curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
