from __future__ import annotations

import re

from treadle.conf.load import compose
from treadle.conf.schema import HardwareConfig
from treadle.graph.resolve import resolve
from treadle.serve.bench import facts


def test_versions_name_what_computes():
    found = facts.versions()
    assert re.fullmatch(r"3\.\d+\.\d+", found["python"] or "")
    assert found["torch"]
    assert found["treadle"]
    assert "triton" in found


def test_the_machine_is_the_deployments():
    found = facts.machine(HardwareConfig(device="cpu", name="fast", threads=3, features=("avx2",), memory="1024"))
    assert (found["name"], found["threads"], found["features"], found["memory_bytes"]) == ("fast", 3, ["avx2"], 1024)
    assert found["load_1min"] >= 0


def test_the_revision_is_a_commit_of_these_sources_only(monkeypatch, tmp_path):
    found = facts.revision()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}\+?", found)
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    assert facts.revision() is None


def test_memory_is_what_was_planned_for_tensors_beside_what_was_reserved():
    resolved = resolve(compose(["model=qwen3-0.6b", "hardware=cpu", "model.max_len=64", "kv.memory=64MiB"]))
    runtime = next(row.nbytes for row in resolved.plan.rows if row.kind == "runtime")
    found = facts.memory(resolved.plan, 5, 6)
    assert found == {"planned_bytes": resolved.plan.total_bytes - runtime, "ready_bytes": 5, "end_bytes": 6}
    assert facts.memory(resolved.plan, 0, 0) == {}
