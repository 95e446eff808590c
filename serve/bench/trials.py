"""The trials of all rows: engines take turns within a row, since machines get faster and slower while they run."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treadle.conf.recipe import Row
from treadle.serve.bench.others import Others
from treadle.serve.bench.results import FigureResult, RowResult

Trial = Callable[[int], dict[str, float]]
"""Takes a seed and returns the figures of one trial."""

Rows = Mapping[str, tuple[Row, Mapping[str, Trial]]]
"""Rows by name, each with the engines that take part in it."""


class TrialBar:
    """Trials done, and the row and engine of the next, on standard error; a line for each trial without a terminal."""

    def __init__(self, total: int) -> None:
        self._console = console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=text)

    def advance(self, text: str, figures: Mapping[str, float]) -> None:
        """Count a trial; who has no terminal, or stops a long run, has seen its figures."""
        self._progress.advance(self._task)
        if not self._console.is_terminal:
            found = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            self._console.print(f"{text}: {found}", soft_wrap=True, highlight=False, markup=False)


def run_rows(rows: Rows, *, trials: int, warmup: int, patience_s: float) -> dict[str, RowResult]:
    """Return the results of rows by name.

    ``trials`` is for rows that say nothing of their own; ``warmup`` trials before them do not count. All engines of a
    row get the same seeds. A trial waits up to ``patience_s`` for a quiet machine, and within it is tried again while
    others disturb it.
    """
    with TrialBar(sum((warmup + (row.trials or trials)) * len(engines) for row, engines in rows.values())) as bar:
        return {
            name: _run_row(name, row, engines, range(-warmup, row.trials or trials), patience_s, bar)
            for name, (row, engines) in rows.items()
        }


def _run_row(
    name: str, row: Row, engines: Mapping[str, Trial], indices: Sequence[int], patience_s: float, bar: TrialBar
) -> RowResult:
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    disturbed = 0
    for index in indices:
        for engine, trial in engines.items():
            bar.show(f"{name} {engine}")
            seed = zlib.crc32(f"{name} {index}".encode())
            figures, clean = _run_trial(trial, seed, patience_s if index >= 0 else 0.0)
            if index >= 0:
                found[engine].append(figures)
                disturbed += not clean
            bar.advance(f"{name} {engine}", figures)
    figures_of_row = {figure: FigureResult.of(figure, goals, found) for figure, goals in row.shown.items()}
    return RowResult(row=row, figures=figures_of_row, disturbed=disturbed)


def _run_trial(trial: Trial, seed: int, patience_s: float) -> tuple[dict[str, float], bool]:
    """Return the figures of a trial and whether it had the machine for itself."""
    others, deadline_s = Others(), time.monotonic() + patience_s
    while True:
        others.wait_for_quiet(deadline_s)
        figures = trial(seed)
        clean = others.quiet()
        if clean or time.monotonic() >= deadline_s:
            return figures, clean
        seed += 1  # the same prompts would be found in a prefix cache
