from __future__ import annotations

import pytest

from treadle.conf.errors import ConfigError
from treadle.conf.origin import blame_preset
from treadle.graph import machine
from treadle.serve.__main__ import main

WINS = ", and what the command line sets wins"


def blamed(key: str, *overrides: str, config_dir=None) -> str:
    return str(blame_preset(ConfigError("wrong", key=key, value=1), overrides, config_dir))


def test_a_value_of_a_preset_is_said_to_be_one():
    said = f"kv.host_memory=1: wrong; preset=agent-sessions sets kv.host_memory=40%{WINS}"
    assert blamed("kv.host_memory", "preset=agent-sessions", "model=llama3-8b") == said
    assert blamed("scheduler.overlap", "preset=single-gpu").endswith(f"sets scheduler.overlap=true{WINS}")


def test_so_is_a_choice_of_a_preset_that_has_the_key():
    assert blamed("hardware.device", "preset=single-gpu").endswith(f"; preset=single-gpu sets hardware=cuda{WINS}")
    assert blamed("hardware.device", "preset=single-gpu", "hardware.device=cuda") == "hardware.device=1: wrong"
    assert "preset" not in blamed("hardware.device", "preset=single-gpu", "hardware=h200")
    assert blamed("hardware.threads", "preset=single-gpu") == "hardware.threads=1: wrong"


@pytest.mark.parametrize(
    "overrides",
    [["kv.host_memory=40%"], ["preset=agent-sessions", "kv.host_memory=1"], ["preset=laptop"], ["preset=none"], []],
)
def test_what_no_preset_set_is_the_users_own(overrides):
    assert blamed("kv.host_memory", *overrides) == "kv.host_memory=1: wrong"


def test_another_choice_that_set_it_is_named():
    assert blamed("hardware.device", "hardware=h200").endswith(": wrong; hardware=h200 sets hardware.device=cuda")
    assert blamed("hardware.device", "hardware=h200", "hardware.device=cuda").endswith(": wrong")
    assert blamed("hardware.threads", "hardware=cpu").endswith(": wrong")
    assert blamed("model.path", "model=hf").endswith(": wrong")
    assert blamed("model.config", "model=llama3-8b").endswith(": wrong")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("# @package _global_\ndefaults: [_self_]\nkv: {page_tokens: 3}\n", f"; preset=p sets kv.page_tokens=3{WINS}"),
        ("kv: [\n", ""),
        ("3\n", ""),
    ],
)
def test_a_preset_of_the_user_is_read_too(tmp_path, text, more):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "p.yaml").write_text(text)
    assert blamed("kv.page_tokens", "preset=p", config_dir=tmp_path) == f"kv.page_tokens=1: wrong{more}"


def test_the_command_line_says_it_once_and_in_a_sweep(monkeypatch, capsys):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 24 << 30)
    for flags in [], ["-m"]:
        assert main(["memory", *flags, "preset=agent-sessions", "model=llama3-8b", "hardware=cpu"]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: kv.host_memory=9.60 GiB: ")
        assert message.count(f"; preset=agent-sessions sets kv.host_memory=40%{WINS}") == 1
