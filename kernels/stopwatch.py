"""Times the kernels that could do one call, on random tensors of its shapes, and remembers the outcome on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.kernels.backend.protocol import Backend
from treadle.kernels.registry import Kernel

OUTSIDE_BYTES = 160 << 20
"""What a run reads at least, so that no weight is found in a cache where a whole step would have pushed it out."""
MOST_COPIES = 16


class Stopwatch:
    """Timings on one device. ``file`` is read once and written with every new timing; who writes last wins."""

    def __init__(self, backend: Backend, file: Path) -> None:
        self._backend, self._file = backend, file
        self._known: dict[str, dict[str, float]] = {}
        if file.exists():
            # A file that a crash cut short is measured anew.
            with contextlib.suppress(json.JSONDecodeError):
                self._known = json.loads(file.read_text())

    def fastest(self, kernels: Sequence[Kernel], calls: Mapping[str, Callable[[], dict[str, Any]]]) -> Kernel:
        """Return the kernel whose times, relative to the best of each of the ``calls``, add up to the least.

        ``calls``: what describes a call -> makes its arguments, by name.
        """
        total = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
        for description, arguments in calls.items():
            times = self._times(kernels, description, arguments)
            for name, seconds in times.items():
                total[name] += seconds / min(times.values())
        return min(kernels, key=lambda kernel: total[kernel.name])

    def _times(
        self, kernels: Sequence[Kernel], description: str, arguments: Callable[[], dict[str, Any]]
    ) -> dict[str, float]:
        names = [kernel.name for kernel in kernels]
        facts = (self._backend.version, description, names)
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        if key not in self._known:
            made = arguments()
            size = sum(value.nbytes for value in made.values() if isinstance(value, Tensor))
            copies = [made] + [
                {name: value.clone() if isinstance(value, Tensor) else value for name, value in made.items()}
                for _ in range(min(MOST_COPIES, OUTSIDE_BYTES // max(size, 1)))
            ]
            self._known[key] = {kernel.name: self._seconds(kernel, copies) for kernel in kernels}
            self._write()
        return self._known[key]

    @torch.inference_mode()
    def _seconds(self, kernel: Kernel, copies: Sequence[dict[str, Any]]) -> float:
        def work() -> None:
            for arguments in copies:
                kernel.function(*arguments.values())

        return self._backend.seconds(work) / len(copies)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=self._file.parent, prefix=".timings-")
        with os.fdopen(handle, "w") as file:
            json.dump(self._known, file, indent=1)
        os.replace(scratch, self._file)
