from __future__ import annotations

import pytest

from treadle.conf.recipe import Figure, Prefill
from treadle.serve.bench.others import Others
from treadle.serve.bench.trials import run_rows


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(Others, "quiet", lambda self: True)
    monkeypatch.setattr(Others, "wait_for_quiet", lambda self, deadline_s: None)


class Engine:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __call__(self, seed):
        self.log.append((self.name, seed))
        return {"ttft_ms": float(len(self.log)), "prompt_tok_s": 1.0}


def test_engines_take_turns_on_the_same_seeds_and_warm_up_does_not_count():
    log = []
    row = Prefill(prompt=4, figures={"ttft_ms": Figure(target=3.0)})
    engines = {"treadle": Engine("treadle", log), "other": Engine("other", log)}
    found = run_rows({"row": (row, engines)}, trials=3, warmup=1, patience_s=0)["row"]
    assert [name for name, _ in log] == ["treadle", "other"] * 4
    seeds = [seed for _, seed in log]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    figure = found.figures["ttft_ms"]
    assert list(found.figures) == ["ttft_ms"], "only what the row shows"
    assert figure.engines["treadle"].trials == [3.0, 5.0, 7.0]
    assert figure.engines["other"].trials == [4.0, 6.0, 8.0]
    assert (figure.engines["treadle"].median, figure.engines["treadle"].min, figure.engines["treadle"].max) == (5, 3, 7)
    assert figure.target == 3.0


def test_a_row_may_have_trials_of_its_own():
    log = []
    run_rows(
        {"row": (Prefill(prompt=4, trials=2), {"treadle": Engine("treadle", log)})}, trials=9, warmup=0, patience_s=0
    )
    assert len(log) == 2


def test_seeds_are_the_same_in_every_run():
    runs = []
    for _ in range(2):
        log = []
        run_rows({"row": (Prefill(prompt=4), {"treadle": Engine("treadle", log)})}, trials=2, warmup=1, patience_s=0)
        runs.append(log)
    assert runs[0] == runs[1]
    assert runs[0][0][1] == 1394305509


def test_a_trial_that_others_disturb_is_tried_again_with_other_prompts(monkeypatch):
    quiet = [False, False, True]
    monkeypatch.setattr(Others, "quiet", lambda self: quiet.pop(0))
    log = []
    engines = {"treadle": Engine("treadle", log)}
    found = run_rows({"row": (Prefill(prompt=4), engines)}, trials=1, warmup=0, patience_s=60)["row"]
    assert len({seed for _, seed in log}) == 3
    assert found.disturbed == 0
    assert found.figures["ttft_ms"].engines["treadle"].trials == [3.0], "only the clean one counts"


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(Others, "quiet", lambda self: False)
    log = []
    engines = {"treadle": Engine("treadle", log)}
    found = run_rows({"row": (Prefill(prompt=4), engines)}, trials=2, warmup=1, patience_s=0)["row"]
    assert len(log) == 3
    assert found.disturbed == 2


def test_without_a_terminal_every_trial_says_what_it_found(capsys):
    row = Prefill(prompt=4, figures={"ttft_ms": Figure(target=3.0)})
    run_rows({"first[/x]": (row, {"treadle": Engine("treadle", [])})}, trials=2, warmup=0, patience_s=0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"first[/x] treadle: ttft_ms {index}, prompt_tok_s 1" for index in (1, 2)]
