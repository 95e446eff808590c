"""Other engines as players, each in a fresh process: a line of JSON asks for a play, a line answers with its traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from treadle.conf.recipe import Decode, Prefill, Rival, Row, Throughput
from treadle.serve.bench.play import Trace

NODE_PROGRAM = Path(__file__).with_name("node_llama_cpp.mjs")


class RivalError(RuntimeError):
    """A rival that is not installed or failed: what it said last."""


class RivalPlayer:
    """A rival's process. Raises RivalError if it does not come up."""

    def __init__(self, rival: Rival, model: Path, *, threads: int, batch: int, context: int) -> None:
        """``batch`` requests of ``context`` tokens each are the most that will be played at once."""
        settings = {
            "engine": rival.engine,
            "dtype": rival.dtype,
            "model": str(model),
            "threads": threads,
            "batch": batch,
            "context": context,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-rival-")
        self._log = Path(self._folder.name) / "log"
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    _command(rival, json.dumps(settings)),
                    cwd=rival.folder if rival.engine == "node-llama-cpp" else None,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        except OSError as error:
            self._folder.cleanup()
            raise RivalError(f"{error.strerror}: {error.filename}") from None
        try:
            self.version: str = self._answer()["version"]
        except RivalError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def play(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, at_s: Sequence[float] | None = None
    ) -> list[Trace]:
        """Return a trace of each prompt, all arriving at once. Raises RivalError."""
        assert at_s is None, "rivals take requests together"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return [Trace(0.0, token_s) for token_s in self._answer()["token_s"]]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _failure(self) -> RivalError:
        self._process.wait()
        said = self._log.read_text(errors="replace").strip().splitlines()
        errors = [line.strip() for line in said if "Error" in line]
        return RivalError((errors or said or [f"exit code {self._process.returncode}"])[-1])


def plays(row: Row) -> bool:
    """Whether rivals take part in a row: those where all requests come at once."""
    return isinstance(row, Prefill | Decode | Throughput)


def _command(rival: Rival, settings: str) -> list[str]:
    if rival.engine == "node-llama-cpp":
        return ["node", str(NODE_PROGRAM), settings]
    return [sys.executable, "-P", "-m", "treadle.serve.bench.rival_process", settings]
