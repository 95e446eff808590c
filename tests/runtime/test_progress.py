import io
import re

from rich.console import Console

from treadle.runtime import progress
from treadle.runtime.progress import AnswerBar, PhaseBars


def terminal(monkeypatch, is_terminal=True):
    """Return the file that stands for standard error."""
    file = io.StringIO()

    def make(stderr):
        assert stderr
        return Console(file=file, force_terminal=is_terminal, width=100)

    monkeypatch.setattr(progress, "Console", make)
    return file


def test_answers_and_their_rate(monkeypatch):
    file = terminal(monkeypatch)
    with AnswerBar(3) as bar:
        bar.advance(10, 1)
        bar.advance(5, 2)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "3/3" in shown
    assert re.search(r"[1-9][\d.]* tok/s", shown)


def test_nothing_is_shown_unless_wanted_and_seen(monkeypatch):
    for is_terminal, show in ((True, False), (False, True)):
        file = terminal(monkeypatch, is_terminal)
        with AnswerBar(1, show) as bar:
            bar.advance(1, 1)
        assert file.getvalue() == ""


def test_phases_are_shown_once_they_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = terminal(monkeypatch)
    with PhaseBars() as bars:
        bars("quick", 1, 2)
        now[0] = 0.5
        bars("slow", 0, 4)
        assert file.getvalue() == ""
        now[0] = 2.0
        bars("slow", 3, 4)
    assert "slow" in file.getvalue()
    assert "quick" not in file.getvalue()
