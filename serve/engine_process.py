"""The engine process as its parent sees it: started in a fresh interpreter, watched, and explained when it dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from treadle.runtime.protocol import Endpoints, Failure

KEPT_LINES = 15
"""lines of the engine's standard error that are kept to explain its death"""


class EngineDiedError(RuntimeError):
    """The engine process ended by itself: how, and its last words. ``user`` marks a mistake in the configuration."""

    def __init__(self, message: str, user: bool = False) -> None:
        super().__init__(message)
        self.user = user


def worker_command(endpoints: Endpoints) -> list[str]:
    """Return the command line of the engine process. -P keeps the current folder off its import path."""
    return [sys.executable, "-P", "-m", "treadle.runtime.worker", endpoints.folder]


class EngineProcess:
    """One running engine process.

    ``on_line`` gets each line of its standard error and ``on_exit`` is called once, both from threads of this object.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        command: Sequence[str],
        on_line: Callable[[str], None],
        on_exit: Callable[[], object],
    ) -> None:
        self._endpoints = endpoints
        self._on_line = on_line
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        # A session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then drains.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="engine stderr", daemon=True)
        self._reader.start()
        self._watcher = threading.Thread(target=self._watch, name="engine exit", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def death(self) -> EngineDiedError:
        """Return what ended the process: its own message, or else its exit code or signal, and its last lines."""
        # Grandchildren (compilers) may hold the pipe open, so the last lines are waited for only briefly.
        self._reader.join(timeout=0.5)
        code = self._process.wait()
        if self._endpoints.failure.exists():
            failure = msgspec.json.decode(self._endpoints.failure.read_bytes(), type=Failure)
            if failure.user:
                return EngineDiedError(failure.message, user=True)
            how = f"failed: {failure.message}"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        tail = "\n".join(f"    {line}" for line in self._tail)
        return EngineDiedError(f"the engine process {how}" + (f"; its last lines were\n{tail}" if tail else ""))

    def stop(self, grace_s: float) -> None:
        """Wait ``grace_s`` for the process to leave by itself, then kill it."""
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        # After this `on_exit` is never called again.
        self._watcher.join()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._tail.append(line.rstrip("\n"))
                self._on_line(line.rstrip("\n"))

    def _watch(self) -> None:
        self._process.wait()
        self._on_exit()
