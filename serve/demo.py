"""``python -m treadle.serve.demo``: start the server, stream one answer, say how fast it was and what to try next."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

# Without an apostrophe, so that the line for the shell needs no escapes.
PROMPT = "What is a loom, and what does its treadle do? Answer in two sentences."
MAX_TOKENS = 128


def main(overrides: Sequence[str]) -> int:
    """Run the demo with ``overrides`` of the configuration. Returns the exit code.

    In a terminal the server stays until Ctrl-C, elsewhere it ends with the answer.
    """
    port = _free_port()
    command = [sys.executable, "-P", "-m", "treadle.serve", "serve", f"serve.port={port}", *overrides]
    server = subprocess.Popen(command)
    try:
        base = f"http://127.0.0.1:{port}"
        if not _wait_ready(server, base):
            return server.wait()
        model = _get(f"{base}/v1/models")["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS}
        print(f"\n> {PROMPT}\n", flush=True)
        _show(base, body)
        data = json.dumps(body)
        print(
            f"\nTry next:\n\n  curl {base}/v1/chat/completions \\\n    -H 'content-type: application/json' -d '{data}'\n"
        )
        if sys.stdin.isatty():
            print("The server runs until Ctrl-C.", flush=True)
            return server.wait()
        server.send_signal(signal.SIGTERM)
        return server.wait()
    except KeyboardInterrupt:
        # The server shares the terminal and has got the signal too.
        return server.wait()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _show(base: str, body: dict[str, Any]) -> None:
    """Print an answer as it comes, then its speed."""
    began_s, first_s = time.monotonic(), 0.0
    usage: dict[str, Any] = {}
    for event in _events(base, body | {"stream": True, "stream_options": {"include_usage": True}}):
        for choice in event["choices"]:
            text = choice["delta"].get("content", "")
            if text and not first_s:
                first_s = time.monotonic()
            print(text, end="", flush=True)
        usage = event.get("usage") or usage
    end_s, count = time.monotonic(), usage["completion_tokens"]
    rate = (count - 1) / (end_s - first_s) if count > 1 else 0.0
    print(f"\n\n{count} tokens, the first after {first_s - began_s:.2f} s, then {rate:.1f} tokens/s")


def _events(base: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed chat answer."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event


def _wait_ready(server: subprocess.Popen[bytes], base: str) -> bool:
    """Wait until the server answers; False if it ended instead."""
    while server.poll() is None:
        try:
            return bool(_get(f"{base}/health"))
        except urllib.error.URLError:
            time.sleep(0.05)
    return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def _free_port() -> int:
    """Return the port that README names, or another one where that is taken."""
    for port in (8000, 0):
        try:
            with socket.create_server(("127.0.0.1", port)) as probe:
                return int(probe.getsockname()[1])
        except OSError:
            continue
    raise OSError("no free port on 127.0.0.1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
