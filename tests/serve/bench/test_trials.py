from __future__ import annotations

import pytest

from treadle.conf.recipe import Figure, Prefill
from treadle.serve.bench.trials import run_rows


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr("treadle.serve.bench.trials.Others.share", lambda self: 0.0)


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
    found = run_rows({"row": (row, engines)}, trials=3, warmup=1)["row"]
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
    run_rows({"row": (Prefill(prompt=4, trials=2), {"treadle": Engine("treadle", log)})}, trials=9, warmup=0)
    assert len(log) == 2


def test_seeds_are_the_same_in_every_run():
    runs = []
    for _ in range(2):
        log = []
        run_rows({"row": (Prefill(prompt=4), {"treadle": Engine("treadle", log)})}, trials=2, warmup=1)
        runs.append(log)
    assert runs[0] == runs[1]
    assert runs[0][0][1] == 1394305509


@pytest.mark.parametrize(("shares", "plays", "disturbed"), [([0.0], 1, 0), ([0.5, 0.1], 2, 0), ([0.5, 0.5, 0.5], 3, 1)])
def test_a_trial_that_others_disturb_is_tried_again(monkeypatch, shares, plays, disturbed):
    left = list(shares)
    monkeypatch.setattr("treadle.serve.bench.trials.Others.share", lambda self: left.pop(0))
    log = []
    found = run_rows({"row": (Prefill(prompt=4), {"treadle": Engine("treadle", log)})}, trials=1, warmup=0)["row"]
    assert len({seed for _, seed in log}) == len(log) == plays
    assert found.disturbed == disturbed
    assert found.figures["ttft_ms"].engines["treadle"].trials == [float(plays)], "the last one counts"
