"""What a person sees while a server starts: a bar for the phase that runs, then where every second went."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

_began_s: float | None = None


@contextmanager
def one_of_several() -> Iterator[None]:
    """Count the seconds of a start in here from now on: the process was there before, for another run."""
    global _began_s
    _began_s = time.monotonic()
    try:
        yield
    finally:
        _began_s = None


def run_start_s() -> float:
    """Return when this run began: with the process, or as one_of_several."""
    return process_start_s() if _began_s is None else _began_s


def process_start_s() -> float:
    """Return when this process started, on the clock of time.monotonic; now, where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


class Startup:
    """Phases one after another, from the start of the run; each lasts until the next one begins."""

    def __init__(self, console: Console, first: str) -> None:
        self._console = console
        self._marks: list[tuple[str, float]] = [(first, run_start_s())]
        self._end_s: float | None = None
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._bar: TaskID | None = None
        if console.is_terminal:
            self._bars.start()

    def phase(self, name: str, at_s: float | None = None, done: int = 0, total: int = 0) -> None:
        """Begin a phase, or move the bar of the one that runs."""
        if name != self._marks[-1][0]:
            self._marks.append((name, time.monotonic() if at_s is None else at_s))
            self._drop_bar()
            self._bar = self._bars.add_task(name, total=total or None)
            if not self._console.is_terminal:
                self.line(f"{name} ...")
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total or None)

    def line(self, text: str) -> None:
        """Print a line above the bar. May be called from any thread."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        """End the last phase and take the bar away. Further calls do nothing."""
        if self._end_s is None:
            self._end_s = time.monotonic()
            self._drop_bar()
            self._bars.stop()

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Return the phases so far with their seconds."""
        ends = [start for _, start in self._marks[1:]] + [self._end_s or time.monotonic()]
        return [(name, end - start) for (name, start), end in zip(self._marks, ends)]

    def table(self) -> Table:
        """Return the phases as a table, with their shares of the whole."""
        phases = self.phases
        whole_s = sum(seconds for _, seconds in phases)
        table = Table(title="start-up", show_footer=True)
        table.add_column("phase", footer="ready after")
        table.add_column("seconds", footer=f"{whole_s:.2f}", justify="right")
        table.add_column("share", footer="100 %", justify="right")
        for name, seconds in phases:
            table.add_row(name, f"{seconds:.2f}", f"{100 * seconds / whole_s:.0f} %")
        return table

    def _drop_bar(self) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
