"""Progress bars for what takes over a second: downloads, loading, compiling, generating."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_PATIENCE_S = 1.0


class PhaseBars:
    """An OnPhase that shows the phase on standard error once it has lasted a second, and then leaves no trace."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._phase: str | None = None
        self._task: TaskID | None = None
        self._since_s = 0.0

    def __enter__(self) -> PhaseBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress.live.is_started:  # stopping what never started prints an empty line
            self._progress.stop()

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Note that ``phase`` has got to ``done`` of ``total``; 0 of 0 if nobody knows."""
        now = time.monotonic()
        if phase != self._phase:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._phase, self._task, self._since_s = phase, None, now
        if self._task is None and now - self._since_s >= _PATIENCE_S:
            self._progress.start()
            self._task = self._progress.add_task(phase, total=None, amount="")
        if self._task is not None:
            amount = f"{100 * done / total:.0f} %" if total else f"{done / 1e6:.0f} MB" if done else ""
            self._progress.update(self._task, completed=done, total=total or None, amount=amount)


class AnswerBar:
    """Prompts done and tokens a second of one call, on standard error; nothing without a terminal."""

    def __init__(self, total: int, show: bool = True) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f} tok/s"),
            TimeElapsedColumn(),
            console=console,
            disable=not show or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, rate=0.0)
        self._tokens = 0
        self._since_s = time.monotonic()

    def __enter__(self) -> AnswerBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int, num_finished: int) -> None:
        """Count new tokens and finished prompts."""
        self._tokens += num_tokens
        rate = self._tokens / max(time.monotonic() - self._since_s, 1e-9)
        self._progress.update(self._task, advance=num_finished, rate=rate)
