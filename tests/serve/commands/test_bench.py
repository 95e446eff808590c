from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.serve.__main__ import main

FOLDER = str(Path(__file__).parents[1] / "bench" / "conf")
TINY = ("--config-dir", FOLDER, "bench=tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("treadle.serve.bench.ceilings.LARGEST_BYTES", 1 << 20)
    monkeypatch.setattr("treadle.serve.bench.ceilings.SMALLEST_SIDE", 64)
    monkeypatch.setattr("treadle.serve.bench.ceilings.LARGEST_SIDE", 64)


def made(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_a_recipe_is_measured_written_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", *TINY, "--output", str(tmp_path)]) == 0
    (found,) = made(tmp_path)
    assert found["recipe"] == "tiny"
    assert found["deployment"]["model"]["config"]["hidden_size"] == 64
    assert found["deployment"]["passes"]["kernels"] == "reference"
    assert found["fingerprint"].startswith("fp_")
    assert found["versions"]["torch"]
    assert found["ceilings"]["read_gb_s"] > 0
    assert found["rivals"]["absent"].startswith("not run:")
    assert list(found["rows"]) == ["decode", "prefill", "throughput", "shared", "arrivals", "start"]
    for name, row in found["rows"].items():
        for figure in row["figures"].values():
            assert list(figure["engines"]) == ["treadle"]
            assert len(figure["engines"]["treadle"]["trials"]) == (1 if name == "start" else 2)
            assert figure["engines"]["treadle"]["min"] > 0
    assert list(found["rows"]["decode"]["figures"]) == ["tpot_ms"]
    assert len(found["rows"]["arrivals"]["figures"]) == 9
    printed = capsys.readouterr().out
    assert "tiny: tiny on" in printed
    assert "second_s" in printed
    assert str(tmp_path) in printed.replace("\n", "")


def test_a_sweep_writes_a_file_for_each_job(tmp_path):
    rows = [f"~bench.rows.{name}" for name in ("decode", "throughput", "shared", "arrivals", "start")]
    words = ["bench", "-m", *TINY, "bench.trials=1", *rows, "kv.page_tokens=4,8", "--output", str(tmp_path)]
    assert main(words) == 0
    found = made(tmp_path)
    assert sorted(one["deployment"]["kv"]["page_tokens"] for one in found) == [4, 8]
    assert found[0]["fingerprint"] != found[1]["fingerprint"]


def test_mistakes_end_before_anything_is_built(tmp_path, capsys):
    assert main(["bench"]) == 2
    assert "did you mean bench=cpu or bench=llama3-8b or bench=qwen3-0.6b" in capsys.readouterr().err.replace("\n", " ")
    assert main(["bench", *TINY, "bench.rows.decode.batch=9"]) == 2
    assert "did you mean scheduler.max_num_seqs=9?" in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.iterdir())
