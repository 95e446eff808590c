"""A Mooncake master of this engine's own, for development: it ends with the engine, however that ends."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from treadle.runtime.state.tiers.store import StoreError

START_S = 10.0
END_S = 5.0
# The shell waits for the end of its input, which comes also when this process is killed.
_SUPERVISE = '"$@" & master=$!; read -r _; kill -9 "$master"'


class MooncakeMaster:
    """The service that knows where objects of a Mooncake store are; ``address`` is where it answers."""

    def __init__(self, program: Path, port: int | None = None) -> None:
        """Start it on a port, or on a free one. Raises StoreError if it does not answer in time."""
        free, metrics = _free_ports()
        port = free if port is None else port
        self.address = f"127.0.0.1:{port}"
        command = [str(program), "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1"]
        command += [f"-metrics_port={metrics}", "-enable_metric_reporting=false"]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISE, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + START_S
        while not answers(self.address):
            if time.monotonic() > end:
                self.close()
                raise StoreError(f"{program} does not answer on {self.address}")
            time.sleep(0.02)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_ports() -> tuple[int, int]:
    """Return two ports that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


def answers(address: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
    except OSError:
        return False
    return True
