from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
import yaml

from treadle.conf.document import choices
from treadle.conf.load import compose
from treadle.conf.override import schema_keys
from treadle.graph import machine
from treadle.graph.resolve import resolve
from treadle.serve.__main__ import main

PRESETS = [name for name, _ in choices("preset")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "presets.md"
ELSEWHERE = ["model=llama3-8b", "hardware=h200"]
"""a plan for this can be made on any machine"""


def written(name: str) -> dict[str, object]:
    """Return the keys and choices that the YAML of a preset sets."""
    tree = yaml.safe_load((resources.files("treadle.conf") / "preset" / f"{name}.yaml").read_text())
    found = {}
    for entry in tree.pop("defaults", []):
        ((group, choice),) = entry.items()
        found[group.removeprefix("override /")] = choice
    return found | {f"{group}.{key}": value for group, keys in tree.items() for key, value in keys.items()}


def spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_presets_that_there_are():
    assert PRESETS == ["agent-sessions", "laptop", "low-latency", "single-gpu", "throughput"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_the_deployment_then_has(name):
    deployment = compose([f"preset={name}"])
    for key, value in written(name).items():
        if "." in key:
            assert key in schema_keys()
            group, _, leaf = key.partition(".")
            assert getattr(getattr(deployment, group), leaf) == value, key


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "laptop"])
def test_a_preset_leaves_the_model_and_the_machine_to_choose(name):
    resolved = resolve(compose([f"preset={name}", *ELSEWHERE]))
    assert resolved.deployment.model.name == "llama3-8b"
    assert resolved.deployment.hardware.name == "h200"
    assert resolved.plan.max_num_seqs == written(name)["scheduler.max_num_seqs"]
    assert resolved.plan.full_sequences >= 1


def test_what_the_page_says_of_plans_is_so_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(machine, "cuda_device", lambda: None)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 16 << 30)
    for name in PRESETS:
        assert main(["memory", f"preset={name}"]) == (2 if name == "single-gpu" else 0)
    hints = capsys.readouterr().err
    assert hints.startswith("error: hardware.device=cuda: no such device answers here; did you mean hardware=cpu?")
    named = re.findall(r"hardware[.\w]*=\w+", hints.partition("; preset=")[0])
    assert named == ["hardware.device=cuda", "hardware=cpu", "hardware=h200", "hardware.memory=80GiB"]
    for works in named[1:]:
        assert main(["memory", "preset=single-gpu", works]) == 0
    assert "preset=single-gpu hardware=h200" in PAGE.read_text()
    assert main(["generate", "Hello", "hardware=h200"]) == 2
    assert "did you mean hardware=cpu?; treadle memory plans for one elsewhere" in capsys.readouterr().err


def test_what_presets_are_for():
    plans = {name: resolve(compose([f"preset={name}", *ELSEWHERE])).plan for name in PRESETS if name != "laptop"}
    assert (
        plans["throughput"].max_step_tokens > plans["single-gpu"].max_step_tokens > plans["low-latency"].max_step_tokens
    )
    assert plans["throughput"].workspace_bytes > plans["low-latency"].workspace_bytes
    assert resolve(compose(["preset=laptop", "model=gemma3-270m"])).plan.total_bytes < 4 << 30


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_shows_every_key_of_a_preset_and_no_other(name):
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    shown = dict(re.findall(r"`([\w.]+)=([^`]+)`", row.split("|")[3]))
    assert shown == {key: spell(value) for key, value in written(name).items()}
