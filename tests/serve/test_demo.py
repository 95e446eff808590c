from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from treadle.serve import demo

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
OVERRIDES = [
    "model=llama3-8b",
    *(f"model.config.{key}={value}" for key, value in TINY.items()),
    "model.dtype=float32",
    "passes=reference",
    "kv.memory=4MiB",
    "scheduler.max_num_seqs=2",
]


def test_the_demo_starts_a_server_streams_from_it_and_stops_it(capfd):
    assert demo.main(OVERRIDES) == 0
    out = capfd.readouterr().out
    assert re.search(r"ready after \d+\.\d s", out)
    assert f"> {demo.PROMPT}" in out
    assert f"{demo.MAX_TOKENS} tokens, first after" in out
    assert "tokens/s" in out
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in out


def test_a_server_that_does_not_start_says_why_and_its_exit_code_is_kept(capfd):
    assert demo.main(["kv.page_token=32"]) == 2
    captured = capfd.readouterr()
    assert "did you mean kv.page_tokens?" in captured.err
    assert "did not start" in captured.out


@pytest.fixture
def port():
    """A server that streams two chunks and the usage to whoever asks."""
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "[Blue"}}]},
        {"choices": [{"delta": {"content": " sky]"}}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_text_is_printed_as_it_is_and_tokens_are_the_servers(port, capsys):
    answer = demo._ask(demo.Console(), port, "m")
    assert "[Blue sky]" in capsys.readouterr().out
    assert answer.num_tokens == 7
    assert answer.first_s > 0
    assert answer.rest_s >= 0


def test_the_curl_line_is_json_for_the_served_model():
    line = demo._curl("my-model")
    assert json.loads(line.partition("-d '")[2].rstrip("'"))["model"] == "my-model"
