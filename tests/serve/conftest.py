"""Servers over real sockets: most with an engine that repeats its prompt, one with a tiny model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

FAKE = Path(__file__).with_name("fake.py")


class ServerProcess:
    """One server process; ``url`` waits until it is ready."""

    def __init__(self, *command: str) -> None:
        # A test runner that ignores SIGHUP hands that on, and the server would respect it as nohup's wish.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if " answers at " in line:
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        assert self._ready.wait(60), self.output
        found = re.search(r"answers at (http://[\d.]+:\d+)/v1", self.output)
        assert found, self.output
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def engine_pid(self) -> int:
        """Wait for the engine process and return its id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for _ in range(500):
            for pid in children.read_text().split():
                if "engine" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    return int(pid)
            time.sleep(0.01)
        raise AssertionError("no engine process")

    def wait_line(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics").text

    def gauge(self, name: str) -> float:
        """Return a metric's value, summed over its labels."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.metrics(), re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def series(self, name: str, **labels: str) -> float:
        """Return the value of the one series of this name that has these labels."""
        want = "".join(rf'(?=[^}}]*{key}="{value}")' for key, value in labels.items())
        values = re.findall(rf"^{re.escape(name)}\{{{want}.*\}} (\S+)$", self.metrics(), re.MULTILINE)
        assert len(values) == 1, (name, labels, values)
        return float(values[0])

    def wait_gauge(self, name: str, value: float, limit_s: float = 5.0) -> None:
        """Wait until a metric has a value; the step loop reports four times a second."""
        deadline = time.monotonic() + limit_s
        while (found := self.gauge(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            time.sleep(0.02)

    def wait_exit(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.wait_exit(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def fake_server(*, files: int | None = None, **options: object) -> ServerProcess:
    """Return a server, with a limit of ``files`` open files."""
    limit = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
    return ServerProcess(*limit, sys.executable, str(FAKE), "serve", json.dumps(options))


def flow(config: dict[str, object]) -> str:
    """Return a mapping as Hydra's command line takes it."""
    return "{" + ",".join(f"{key}:{json.dumps(value)}" for key, value in config.items()) + "}"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One quick server for all tests that leave it as it was."""
    server = fake_server()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def real_server() -> Iterator[ServerProcess]:
    """The command line, with a tiny llama of random weights and a vocabulary of bytes."""
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    model = [
        "model=hf",
        "model.name=tiny",
        "model.weights=dummy",
        "model.dtype=float32",
        f"model.config={flow(config)}",
    ]
    small = [
        "kv.memory=8MiB",
        "kv.host_memory=8MiB",
        "hardware.threads=1",
        "scheduler.max_num_seqs=8",
        "scheduler.max_step_tokens=64",
    ]
    command = [sys.executable, "-P", "-m", "treadle.serve", "serve", "passes=reference", "serve.port=0"]
    server = ServerProcess(*command, *model, *small)
    yield server
    server.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers of one's own."""
    servers: list[ServerProcess] = []

    def make(*, files: int | None = None, **options: object) -> ServerProcess:
        servers.append(fake_server(files=files, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()
