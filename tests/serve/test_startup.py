from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from treadle.serve.startup import Startup, one_of_several, process_start_s


def test_phases_meet_end_to_end():
    startup = Startup(Console(file=io.StringIO()), "configure")
    began = time.monotonic()
    startup.phase("weights", began, 0, 10)
    startup.phase("weights", began + 9, 5, 10)
    startup.phase("compile", began + 1.5)
    startup.finish()
    phases = dict(startup.phases)
    assert list(phases) == ["configure", "weights", "compile"]
    assert phases["configure"] == pytest.approx(began - process_start_s(), abs=0.05)
    assert phases["weights"] == pytest.approx(1.5)
    assert sum(phases.values()) == pytest.approx(time.monotonic() - process_start_s(), abs=0.1)


def test_a_run_after_another_counts_from_its_own_start():
    with one_of_several():
        startup = Startup(Console(file=io.StringIO()), "configure")
        startup.finish()
        assert sum(seconds for _, seconds in startup.phases) < time.monotonic() - process_start_s() - 0.1
    assert Startup(Console(file=io.StringIO()), "configure").phases[0][1] > 0.1


def test_the_table_names_every_phase_and_the_whole():
    console = Console(file=io.StringIO(), width=80)
    startup = Startup(console, "configure")
    startup.phase("load [weights]")
    startup.line("a line [with] brackets")
    startup.finish()
    console.print(startup.table())
    shown = console.file.getvalue()
    for text in ("configure", "load", "ready after", "100 %", "a line [with] brackets"):
        assert text in shown


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    startup = Startup(console, "configure")
    startup.phase("weights", done=3, total=10)
    time.sleep(0.2)
    startup.finish()
    assert "3/10" in console.file.getvalue()
