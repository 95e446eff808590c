from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from treadle.serve.__main__ import main
from treadle.serve.hydra_flags import complete
from treadle.serve.startup import process_start_s, run_start_s

DUMMY = ["model=qwen3-0.6b", "hardware.memory=8GiB"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """An empty current folder, which stays empty whatever runs."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    yield folder
    assert not list(folder.iterdir())


def test_cfg_prints_what_was_composed(capsys):
    assert main(["serve", "--cfg", "job", "kv.page_tokens=32", "model.max_len=auto"]) == 0
    tree = OmegaConf.create(capsys.readouterr().out)
    assert tree.kv.page_tokens == 32
    assert tree.model.name == "smollm2"
    assert main(["--cfg", "job", "--package", "scheduler"]) == 0
    assert "max_queue: 256" in capsys.readouterr().out


def test_cfg_refuses_what_serve_would(capsys):
    assert main(["serve", "--cfg", "job", "kv.page_token=32"]) == 2
    assert "kv.page_tokens" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--cfg", "--info"])
def test_what_is_printed_is_valid(tmp_path, capsys, flag):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "p.yaml").write_text("kv:\n  page_tokens: 4\n")
    words = ["serve", flag, "job" if flag == "--cfg" else "defaults"]
    assert main([*words, "model.sampling.temprature=1"]) == 2
    assert "did you mean model.sampling.temperature?" in capsys.readouterr().err
    assert main([*words, "--config-dir", str(tmp_path), "preset=p"]) == 2
    assert capsys.readouterr().err.startswith("error: preset=p: its keys are of all groups")


def test_info_shows_the_defaults(capsys):
    assert main(["serve", "--info", "defaults", "preset=laptop"]) == 0
    out = capsys.readouterr().out
    assert "preset/laptop" in out
    assert "model/smollm2" in out


def test_a_sweep_runs_the_command_for_each_value(capsys):
    assert main(["memory", "-m", *DUMMY, "kv.page_tokens=8,16", "passes=default,reference"]) == 0
    out = capsys.readouterr().out
    assert out.count("what fits") == 4
    for differs in ("kv.page_tokens=8 passes=default", "kv.page_tokens=16 passes=reference"):
        assert differs.split()[0] in out
        assert differs.split()[1] in out
    assert "pages of 8 tokens" in " ".join(out.split())


@pytest.mark.parametrize("values", ["kv.memory=1KiB,512MiB", "kv.page_tokens=24,16"])
def test_a_job_that_fails_does_not_end_the_sweep(capsys, values):
    assert main(["memory", "-m", *DUMMY, values]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("what fits") == 1
    assert captured.err.startswith(f"error: {values.partition('=')[0]}=")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("code", "runs"), [(0, 1), (1, 1), (2, 3)])
def test_a_server_that_was_ended_ends_the_sweep_and_one_that_is_refused_does_not(monkeypatch, code, runs):
    seen = []

    def run(resolved, console):
        seen.append((resolved.deployment.kv.page_tokens, run_start_s() - process_start_s()))
        return code

    monkeypatch.setattr("treadle.serve.commands.serve.run", run)
    assert main(["serve", "-m", *DUMMY, "hardware=cpu", "kv.page_tokens=8,16,32"]) == code
    assert [page for page, _ in seen] == [8, 16, 32][:runs]
    starts = [start for _, start in seen]
    assert starts == sorted(set(starts)), "each counts from its own start"
    assert starts[0] > 0.1


def test_a_sweep_sees_the_folder_of_the_user(tmp_path, capsys):
    (tmp_path / "mine" / "kv").mkdir(parents=True)
    (tmp_path / "mine" / "kv" / "big.yaml").write_text("page_tokens: 64\n")
    assert main(["memory", "-m", *DUMMY, "--config-dir", str(tmp_path / "mine"), "kv=default,big"]) == 0
    assert "pages of 64 tokens" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_lock_file_is_not_composed(capsys):
    assert main(["memory", "-m", "--lock", "x.yaml", "kv.page_tokens=8,16"]) == 2
    assert "--lock" in capsys.readouterr().err


def test_shell_completion_is_installed_for_treadle(capsys):
    assert main(["-sc", "install=bash"]) == 0
    assert "complete -o nospace" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("treadle ", ["serve", "generate", "memory", "version"]),
        ("treadle mem", ["memory"]),
        ("treadle serve mo", ["model"]),
        ("treadle serve model=q", ["model=qwen3-0.6b"]),
        ("treadle serve kv.page", ["kv.page_tokens="]),
        ("treadle serve --lock x preset=laptop pass", ["passes"]),
        ("treadle generate --max", ["--max-tokens"]),
        ("treadle memory --conf", ["--config-dir"]),
    ],
)
def test_the_shell_completes_commands_groups_keys_and_options(monkeypatch, capsys, line, offers):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert set(offers) <= {word.rstrip("=") if word.rstrip("=") in offers else word for word in words}


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -P -m treadle.serve --hydra-help | true",
        shell=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == b""


def test_the_command_is_left_out_of_what_hydra_completes():
    assert complete("treadle serve --lock x kv.page_tokens=3 mo") == ("treadle kv.page_tokens=3 mo", None)
    assert complete("treadle serve kv=default ") == ("treadle kv=default ", None)
