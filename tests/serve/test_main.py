from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tiny_model import write_model
from tiny_text import TEMPLATE, write_directory

from treadle.serve.__main__ import main
from treadle.serve.commands import COMMANDS

DUMMY = ["model=qwen3-0.6b", "kv.memory=512MiB", "hardware.memory=8GiB"]


def treadle(*words: str, cwd, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "treadle.serve", *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the child processes of the block take more processor time than this, or hang: the machine may be busy."""
    before, begin = os.times(), time.monotonic()
    yield
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < seconds
    assert time.monotonic() - begin < 10 * seconds


def test_help_lists_commands_groups_and_keys(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command.name} " in text
    for part in ("smollm2", "preset", "laptop", "model.path=DIR", "--config-dir", "--cfg job", "version"):
        assert part in text


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "commands" in capsys.readouterr().out


def test_help_of_a_command_has_its_options_and_an_example(capsys):
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--max-tokens" in text
    assert "treadle generate" in text
    assert "model.path=DIR" in text
    assert "serve.port" not in text
    assert "agent-sessions" not in text
    assert main(["serve", "--help"]) == 0
    assert "serve.port" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(capsys, word):
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("treadle 0.")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_its_module_and_takes_its_options(command):
    module = importlib.import_module(f"treadle.serve.commands.{command.name}")
    names = {option.name for option in command.options} | ({command.words} if command.words else set())
    for function, wanted in ((module.run, names - {command.asks}), (getattr(module, "ask", None), names)):
        if function is None:
            assert command.asks is None
            continue
        code = function.__code__
        assert wanted <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serve", "kv.page_token=32"], "did you mean kv.page_tokens?"),
        (["serve", "model=smollm3"], "did you mean model=smollm2?"),
        (["serv"], "did you mean serve?"),
        (["version", "extra"], "treadle version takes nothing behind it: extra"),
        (["serve", "model=hf", "model.path=/no/such/model"], "no such file or directory"),
        (["serve", "model=hf", "model.path=."], "config.json"),
        (["serve", "model=llama3-8b", "hardware=h200"], "hardware=cpu"),
        (["serve", *DUMMY, "kv.memory=64MiB", "model.max_len=30000"], "did you mean model.max_len="),
        (["memory", "--lock", "nothing.yaml"], "no such file"),
        (["lock", *DUMMY, "--output", "no/such/folder/x.yaml"], "cannot be written"),
        (["memory", "-m", "kv.page_token=8,16"], "did you mean kv.page_tokens?"),
        (["-m"], "treadle memory -m"),
        (["generate"], "treadle generate: needs a prompt; write it behind the command, or pipe it in"),
        (["serve", "serve.api_key="], "serve.api_key=null"),
        (["serve", "passes.order=[compile]"], "did you mean passes.order=[place_state,choose_kernels,compile]?"),
    ],
)
def test_a_mistake_is_exit_code_2_one_line_and_no_traceback_within_3_seconds(tmp_path, words, part):
    """Every refusal comes before torch is imported or weights are read."""
    with at_most(seconds=3):
        done = treadle(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serve"], "model.path=tiny: no tokenizer.json"),
        (["generate", "Hello"], "model.path=tiny: no tokenizer.json"),
        (["chat"], "model.path=tiny: no tokenizer.json"),
        (["chat", "model.path=mute"], "no chat template"),
        (["chat", "model.path=whole", "--temperature", "-1"], "temperature=-1"),
        (["generate", "Hello", "model.path=whole", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "1" * 300, "model.path=whole"], "the context holds 256"),
    ],
)
def test_text_that_cannot_be_served_is_refused_before_torch_and_weights(tmp_path, words, part):
    write_model(tmp_path / "tiny")
    for name, template in {"mute": None, "whole": TEMPLATE}.items():
        write_directory(write_model(tmp_path / name), chat_template=template)
    code = (
        "import sys; from treadle.serve.__main__ import main; "
        f"assert main({[words[0], 'model=hf', 'model.path=tiny', *words[1:]]}) == 2; assert 'torch' not in sys.modules"
    )
    with at_most(seconds=3):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
        )
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "prompt"),
    [([], "Hello\nworld"), (["Good", "morning"], "Good morning"), (["--max-tokens", "3"], "Hello\nworld")],
)
def test_a_prompt_may_be_piped_in(monkeypatch, words, prompt):
    asked = []
    monkeypatch.setattr("treadle.serve.commands.generate.run", lambda *_, **options: asked.append(options) or 0)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nworld\n"))
    assert main(["generate", *DUMMY, *words]) == 0
    assert asked[0]["prompt"] == prompt


def test_a_key_that_is_none_is_told_before_a_prompt_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "kv.page_token=8"]) == 2
    assert "did you mean kv.page_tokens?" in capsys.readouterr().err


def test_a_terminal_is_not_waited_for(monkeypatch, capsys):
    terminal = io.StringIO("Hello")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for stdin in (terminal, io.StringIO("\n"), io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"), None):
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["generate", *DUMMY]) == 2
        assert "generate: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [one.name for one in COMMANDS])
@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.sampling.temprature=0.5", "temprature=0.5: no such default; did you mean model.sampling.temperature?"),
        ("model.sampling.temperature=-1", "temperature: -1.0 is outside [0, 100]"),
    ],
)
def test_every_command_refuses_what_serving_would(monkeypatch, capsys, command, override, part):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main([command, *DUMMY, override]) == 2
    assert f"error: model.sampling.{part}" in capsys.readouterr().err


def test_the_plan_needs_no_torch_and_3_seconds(tmp_path):
    write_model(tmp_path / "tiny")
    code = (
        "import sys; from treadle.serve.__main__ import main; "
        "assert main(['memory', 'model=hf', 'model.path=tiny']) == 0; assert 'torch' not in sys.modules"
    )
    with at_most(seconds=3):
        subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=60)


def test_a_bug_is_not_dressed_up_as_a_users_mistake(monkeypatch):
    def broken(*_: object, **__: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("treadle.serve.commands.memory.run", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["memory", *DUMMY])


def test_interrupted_is_130(monkeypatch):
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.serve.commands.memory.run", interrupted)
    assert main(["memory", *DUMMY]) == 130
