from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from treadle.conf.errors import ConfigError
from treadle.conf.recipe import Decode, Figure, Prefill
from treadle.serve.bench.report import table, write
from treadle.serve.bench.results import FigureResult, Results, RowResult


def results() -> Results:
    times = {"treadle": [{"tpot_ms": t} for t in (4.0, 5.0, 9.0)]}
    rates = {name: [{"prompt_tok_s": rate}] for name, rate in (("treadle", 1500.0), ("rival", 1000.0))}
    goals = Figure(target=4.0, floor=2.5, baselines={"vllm": 10.0})
    return Results(
        recipe="test",
        started="2026-01-02T03:04:05Z",
        versions={"torch": "2"},
        machine={"device": "cpu", "name": "a cpu", "threads": 2},
        revision=None,
        fingerprint="fp_0",
        deployment={"model": {"name": "small"}},
        ceilings={"read_gb_s": 40.123},
        memory={"planned_bytes": 100 << 30, "ready_bytes": 101 << 30, "end_bytes": 101 << 30},
        rivals={"rival": "rival 1.0", "gone": "not run: no such module"},
        rows={
            "decode": RowResult(
                row=Decode(context=3, figures={"tpot_ms": goals}),
                figures={"tpot_ms": FigureResult.of("tpot_ms", goals, times)},
            ),
            "prefill": RowResult(
                row=Prefill(prompt=7), figures={"prompt_tok_s": FigureResult.of("prompt_tok_s", Figure(), rates)}
            ),
        },
    )


def test_the_table_says_how_many_times_better():
    console = Console(file=io.StringIO(), width=160)
    console.print(table(results()))
    printed = console.file.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert lines == [
        ["decode", "tpot_ms", "5", "4 .. 9", "10 2.00x", "", "4 0.80x", "2.5 0.50x"],
        ["prefill", "prompt_tok_s", "1,500", "1,500 .. 1,500", "", "1,000 1.50x", "", ""],
    ]
    for text in ("test: small on a cpu, 2 threads", "read_gb_s 40.1", "rival: rival 1.0", "gone: not run: no such",
        "100.00 GiB planned, 101.00 GiB reserved once ready (+1.0%), 101.00 GiB at the end",
    ):  # fmt: skip
        assert text in printed


def test_the_file_holds_every_trial_and_none_is_overwritten(tmp_path):
    first, second = (write(results(), tmp_path / "made") for _ in range(2))
    assert first.name == "test-2026-01-02T030405Z.json"
    assert second.name == "test-2026-01-02T030405Z-2.json"
    found = json.loads(first.read_text())
    assert found["rows"]["decode"]["row"]["workload"] == "decode"
    figure = found["rows"]["decode"]["figures"]["tpot_ms"]
    assert figure["engines"]["treadle"] == {"median": 5.0, "min": 4.0, "max": 9.0, "trials": [4.0, 5.0, 9.0]}
    assert (figure["unit"], figure["higher_is_better"], figure["baselines"]) == ("ms", False, {"vllm": 10.0})
    assert found["ceilings"] == {"read_gb_s": 40.123}


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        write(results(), tmp_path / "file")
