from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from treadle.conf.errors import ConfigError
from treadle.conf.schema import ServeConfig
from treadle.serve.server import _bind


class StreamReader(threading.Thread):
    """One client of a stream; ``text`` grows as it comes."""

    def __init__(self, server, max_tokens=2000):
        super().__init__()
        self.text = ""
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "abc", "max_tokens": max_tokens, "stream": True}
        self.start()

    def run(self):
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for piece in answer.iter_text():
                self.text += piece

    def wait_tokens(self, count):
        deadline = time.monotonic() + 20
        while self.text.count('"text"') < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def events(self):
        return [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]


def test_phases_account_for_the_time(start):
    began = time.monotonic()
    server = start(load_s=1.0)
    assert httpx.get(f"{server.url}/health").status_code == 200
    wall_s = time.monotonic() - began
    seconds = dict(re.findall(r"│ (\S[^│]*?) +│ +([\d.]+) │", server.output))
    total_s = float(seconds.pop("ready after"))
    assert float(seconds["weights"]) == pytest.approx(1.0, abs=0.3)
    assert sum(map(float, seconds.values())) == pytest.approx(total_s, abs=0.05)
    assert 0.9 * wall_s - 0.15 < total_s <= wall_s


def test_sigterm_drains(start):
    server = start(step_s=0.005)
    streams = [StreamReader(server, max_tokens=300) for _ in range(8)]
    for stream in streams[:4]:
        stream.wait_tokens(20)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("shutting down")
    # New connections are taken and told; what runs shows.
    assert httpx.get(f"{server.url}/health").status_code == 503
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert server.gauge("vllm:num_requests_running") > 0
    assert server.wait_exit(20) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    # Four of them were still waiting for a slot.
    for stream in streams:
        stream.join()
        events = stream.events()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "abc" * 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_an_idle_server_is_quick(start, number):
    server = start()
    engine = server.engine_pid()
    httpx.get(f"{server.url}/health")
    server.process.send_signal(number)
    assert server.wait_exit(3) == 0
    assert not _alive(engine)


def test_half_sent_requests_do_not_hold_up_the_exit(start):
    server = start(drain_s=30)
    with (
        socket.create_connection(("127.0.0.1", server.port)) as head,
        socket.create_connection(head.getpeername()) as body,
    ):
        head.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(3) == 0
        answer = body.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
        assert b'"code":"shutting_down"' in answer
    assert "Traceback" not in server.output


def test_a_client_that_does_not_read_its_answer_is_cut_off_quietly(start):
    server = start(drain_s=0.5)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        raw = json.dumps({"prompt": ["ab"] * 64, "max_tokens": 2040, "stream": True}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        time.sleep(3.0)
        server.process.send_signal(signal.SIGTERM)
        server.wait_exit(8)
    assert "Traceback" not in server.output


def test_folders_of_killed_servers_are_swept(start):
    killed = start()
    folder = _folder(killed)
    assert folder.exists()
    killed.kill()
    assert folder.exists()
    server, other = start(), start()
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{other.url}/health").status_code == 200
    assert not folder.exists()
    assert _folder(server).exists()
    server.process.send_signal(signal.SIGTERM)
    own = _folder(server)
    server.wait_exit(5)
    assert not own.exists()


@pytest.mark.parametrize("how", ["second signal", "drain_s"])
def test_what_cannot_be_drained_ends_with_an_error(start, how):
    server = start(step_s=0.01, drain_s=0.5 if how == "drain_s" else 30)
    answers = []
    body = {"prompt": "abc", "max_tokens": 2000}
    whole = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
    )
    whole.start()
    stream = StreamReader(server)
    stream.wait_tokens(3)
    server.wait_gauge("vllm:num_requests_running", 2)
    server.process.send_signal(signal.SIGINT)
    if how == "second signal":
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
    assert server.wait_exit(5) == 1
    stream.join()
    cut = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": "shutting_down"}
    assert json.loads(stream.events()[-1]) == {"error": cut}
    whole.join()
    assert [(answer.status_code, answer.headers["retry-after"], answer.json()) for answer in answers] == [
        (503, "1", {"error": cut})
    ]
    limit = "0.5" if how == "drain_s" else "30"
    assert f"waiting for 2 requests to end, for {limit} s at most; Ctrl-C or another signal cuts off" in server.output
    why = "after 0.5 s" if how == "drain_s" else "at the second signal"
    assert f"cutting off 2 requests {why}" in server.output


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_a_reason(start):
    server = start(step_s=0.01)
    stream = StreamReader(server)
    stream.wait_tokens(5)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait_exit(5) == 1
    stream.join()
    events = stream.events()
    assert "[DONE]" not in events
    assert "SIGKILL" in json.loads(events[-1])["error"]["message"]
    assert not any('"finish_reason":"' in event for event in events)
    assert "the engine process was killed by SIGKILL" in server.output
    assert "hello from the engine" in server.output.rpartition("SIGKILL")[2]


def test_an_exception_in_a_step(start):
    server = start()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "\x02"})
    assert answer.status_code == 500
    assert "illegal instruction" in answer.json()["error"]["message"]
    assert server.wait_exit(5) == 1
    assert "RuntimeError: an illegal instruction in the kernel" in server.output


def test_an_engine_killed_while_it_loads(start):
    server = start(load_s=30)
    server.wait_line("weights")
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait_exit(5) == 1
    assert "the engine process was killed by SIGKILL" in server.output


def test_an_engine_that_fails_to_load(start):
    server = start(fail="crash")
    assert server.wait_exit(20) == 1
    assert "the disk is on fire" in server.output
    assert 'raise RuntimeError("the disk is on fire")' in server.output


def test_a_mistake_in_the_configuration_has_no_traceback(start):
    server = start(fail="user")
    assert server.wait_exit(20) == 2
    assert "model.path=x: tensor embed.weight is missing" in server.output
    assert "Traceback" not in server.output


def test_sigterm_while_loading(start):
    server = start(load_s=30)
    server.wait_line("weights")
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(5) == 143
    assert "ended by SIGTERM before it was ready" in server.output
    assert not _alive(engine)


def test_the_engine_ends_with_its_parent(start):
    server = start()
    httpx.get(f"{server.url}/health")
    engine = server.engine_pid()
    os.kill(server.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _alive(engine):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_health_sees_a_stopped_engine(start):
    server = start(step_s=0.05)
    stream = StreamReader(server, max_tokens=60)
    stream.wait_tokens(2)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 10
        while httpx.get(f"{server.url}/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert "not been heard of" in httpx.get(f"{server.url}/health").json()["error"]["message"]
    finally:
        os.kill(engine, signal.SIGCONT)
    time.sleep(1.5)
    assert httpx.get(f"{server.url}/health").status_code == 200
    stream.join()
    assert stream.events()[-1] == "[DONE]"


def test_a_long_step_is_not_trouble(start):
    server = start(step_s=7.0)
    stream = StreamReader(server, max_tokens=1)
    while stream.is_alive():
        assert httpx.get(f"{server.url}/health").status_code == 200
        time.sleep(0.5)
    assert stream.events()[-1] == "[DONE]"


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve.port={port}.*in use.*serve.port=0"):
            _bind(ServeConfig(port=port))
    with pytest.raises(ConfigError, match=r"serve\.host=192\.0\.2\.1: cannot listen there.*of this machine"):
        _bind(ServeConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"serve\.host=not a host"):
        _bind(ServeConfig(host="not a host"))


def _folder(server):
    command = Path(f"/proc/{server.engine_pid()}/cmdline").read_text().split("\0")
    return Path(command[command.index("engine") + 1])


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
