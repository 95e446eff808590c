"""How long a process takes from its start to its first token. Run as a program: that process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from treadle.conf.lock import to_lock
from treadle.conf.recipe import Start
from treadle.graph.resolve import Resolved
from treadle.kernels.backend.kernel_cache import FOLDER

CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")


def measure_start(resolved: Resolved, row: Start, seed: int) -> dict[str, float]:
    """Return the seconds of a start with empty caches of compiled code, and of one more. Raises RuntimeError."""
    prompt = random.Random(seed).choices(range(resolved.spec.vocab), k=row.prompt)
    with tempfile.TemporaryDirectory(prefix="treadle-start-") as name:
        folder = Path(name)
        deployment = resolved.deployment
        # Compiled code goes with the folder; the checkpoint stays where it is.
        model = replace(
            deployment.model, path=None if resolved.source.path is None else str(resolved.source.path.absolute())
        )
        passes = replace(deployment.passes, compile_cache=str(folder / "compiled"))
        lock = folder / "deployment.yaml"
        lock.write_text(to_lock(replace(deployment, model=model, passes=passes)), encoding="utf-8")
        return {figure: _first_token_s(lock, prompt, folder) for figure in ("cold_s", "second_s")}


def _first_token_s(lock: Path, prompt: list[int], caches: Path) -> float:
    environment = {**os.environ, **{name: str(caches / name.lower()) for name in CACHES}}
    # As for somebody who names none: the engine does.
    environment.pop(FOLDER, None)
    command = [sys.executable, "-P", "-m", "treadle.serve.bench.start", str(lock), json.dumps(prompt)]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
    if line.strip() != "token":
        raise RuntimeError(f"the engine did not start: exit code {process.returncode}")
    return seconds


def main(lock: str, prompt: str) -> None:
    """Build the engine of a lock file and say when it has given a token for ``prompt``, a list of ids as JSON."""
    from treadle.runtime.build import build_engine, read_deployment
    from treadle.runtime.garbage import Garbage
    from treadle.runtime.progress import PhaseBars
    from treadle.serve.bench.play import EnginePlayer

    with PhaseBars() as bars:
        engine = build_engine(read_deployment(Path(lock)), bars)
    EnginePlayer(engine, Garbage()).play([json.loads(prompt)], 1)
    print("token", flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
