from __future__ import annotations

import os
import subprocess
import sys
import time

from treadle.serve.bench import others

SPIN = "import time\nwhile time.process_time() < 0.4: pass"


def test_work_of_ours_and_of_our_children_is_counted():
    before, end = others._tree_s(os.getpid()), time.process_time() + 0.2
    subprocess.run([sys.executable, "-S", "-c", SPIN], check=True)
    while time.process_time() < end:
        pass
    # each alone is at most 0.4; /proc cuts every part to ticks of 10 ms
    assert others._tree_s(os.getpid()) - before >= 0.5
    assert 0 <= others.Others().share() <= 1


def test_the_share_is_what_the_cores_did_without_us(monkeypatch):
    readings = iter([(0.0, 100.0, 10.0), (2.0, 103.0, 12.0), (3.0, 104.0, 13.0)])
    monkeypatch.setattr(others.Others, "_read", lambda self: next(readings))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    watched = others.Others()
    assert watched.share() == 0.25
    assert watched.share() == 0.0


def test_waiting_ends_with_quiet_or_at_the_deadline(monkeypatch):
    shares = [0.5, 0.2, 0.05, 0.5]
    monkeypatch.setattr(others, "LOOK_S", 0.001)
    monkeypatch.setattr(others.Others, "share", lambda self: shares.pop(0))
    watched = others.Others()
    watched.wait_for_quiet(time.monotonic() + 60)
    assert shares == [0.5]
    watched.wait_for_quiet(time.monotonic() - 1)
    assert shares == [], "what happened before is forgotten"


def test_elsewhere_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(others, "PROC", tmp_path)
    assert others.Others().share() == 0.0
