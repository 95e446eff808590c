from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from treadle.conf.errors import ConfigError
from treadle.serve import running
from treadle.serve.running import read_metrics

METRICS = """\
# HELP treadle:arena_bytes Device memory for state of every kind
# TYPE treadle:arena_bytes gauge
treadle:arena_bytes{model_name="m"} 4096.0
# HELP treadle:state_used_bytes What requests hold of a kind of state
# TYPE treadle:state_used_bytes gauge
treadle:state_used_bytes{kind="kv",model_name="m"} 256.0
treadle:state_used_bytes{kind="window 512",model_name="m"} 0.0
# HELP ours:kv_offload_objects Objects in a tier.
# TYPE ours:kv_offload_objects gauge
ours:kv_offload_objects{model_name="m",tier="disk"} 7.0
"""


@contextmanager
def answering(text: str, key: str | None = None, path: str = "/metrics") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("authorization") == f"Bearer {key}"
            self.send_response(404 if self.path != path else 200 if allowed else 401)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1"])
def test_numbers_are_found_by_name_and_label(form: str) -> None:
    with answering(METRICS) as url:
        samples = read_metrics(form.format(url))
    assert samples.model == "m"
    assert samples.value("treadle:arena_bytes") == 4096
    assert samples.by("treadle:state_used_bytes", "kind") == {"kv": 256, "window 512": 0}
    assert samples.named("kv_offload_objects") == "ours:kv_offload_objects"
    assert samples.value("ours:kv_offload_objects", tier="disk") == 7
    assert samples.value("ours:kv_offload_objects", tier="host") == 0
    assert samples.named("nothing") == "nothing"


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    with answering(METRICS) as url:
        assert read_metrics(url.removeprefix("http://")).model == "m"


def test_the_key_is_sent() -> None:
    with answering(METRICS, key="secret") as url:
        assert read_metrics(url, "secret").model == "m"
        with pytest.raises(ConfigError, match=r"/metrics answers 401; give its serve\.api_key=KEY"):
            read_metrics(url)
        with pytest.raises(ConfigError, match=r"401; the serve\.api_key given is not the server's"):
            read_metrics(url, "wrong")


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 1\n", "<html>"])
def test_another_server_is_refused(text: str) -> None:
    with answering(text) as url, pytest.raises(ConfigError, match="no treadle engine answers there"):
        read_metrics(url)


def test_what_does_not_answer_is_refused() -> None:
    with answering(METRICS, path="/elsewhere") as url, pytest.raises(ConfigError, match="answers 404; it was started"):
        read_metrics(url)
    with pytest.raises(ConfigError, match=r"no server answers there: .*refused"):
        read_metrics(url)
    for wrong in ("ftp://127.0.0.1", "http://", "//", "http://[::1", "http://[host]:80"):
        with pytest.raises(ConfigError, match=r"not the address of a server; did you mean http://127\.0\.0\.1:8000"):
            read_metrics(wrong)
    with pytest.raises(ConfigError, match="no server answers there"):
        read_metrics("127.0.0.1:notaport")


def test_what_no_engine_says_is_left_out() -> None:
    strange = METRICS + 'treadle:state_used_bytes{kind="inf"} +Inf\ntreadle:state_used_bytes{other="label"} 1\n'
    with answering(strange) as url:
        assert read_metrics(url).by("treadle:state_used_bytes", "kind") == {"kv": 256, "window 512": 0}


def test_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_BYTES", len(METRICS) - 1)
    with answering(METRICS) as url, pytest.raises(ConfigError, match="the answer does not end"):
        read_metrics(url)
    monkeypatch.undo()
    monkeypatch.setattr(running, "PATIENCE_S", -1.0)
    with pytest.raises(ValueError, match="the answer does not end"):
        running._read(Part())  # type: ignore[arg-type]


class Part:
    """A body of which there is always more."""

    def read1(self, _: int) -> bytes:
        return b"#"
