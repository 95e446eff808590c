"""What is printed of the passes and kernels of a deployment."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from capturing_backend import CapturingBackend
from oracle import tiny
from oracle_engine import resolved
from rich.console import Console

from treadle.conf.errors import ConfigError
from treadle.serve.commands.explain import run

PLAIN = ("hardware=cpu", "hardware.threads=1", "passes.quantize=none", "passes.measure=false")


def explained(*overrides: str, code: int = 0, show: str | None = None, prove: bool = False) -> str:
    console = Console(file=io.StringIO(), width=250)
    assert run(resolved(tiny("llama"), (*PLAIN, *overrides)), console, show=show, prove=prove) == code
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_pass_and_kernel_is_printed() -> None:
    text = explained("passes.compile=false")
    assert "choose_kernels" in text
    assert "norm by torch" in text
    assert text.count("passes") == 1
    assert "compiled" not in text


def test_what_inductor_took_in_is_compiled(tmp_path: Path) -> None:
    text = explained(f"passes.compile_cache={tmp_path}")
    assert "compiled x" in text
    assert ".reference" not in text


def test_the_program_of_small_steps_is_printed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CapturingBackend()
    monkeypatch.setattr("treadle.runtime.build.device", lambda resolved: backend)
    text = explained("passes.compile=false", prove=True)
    for title in ("passes, any step", "kernels, any step", "passes, up to 8 tokens", "kernels, up to 8 tokens"):
        assert text.count(title) == 1
    assert text.count("error / allowed") == 2
    assert explained("passes.compile=false", show="place_state").count("# before PlaceState") == 2


def test_a_program_for_hardware_that_is_not_here_is_lowered_and_neither_compiled_nor_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treadle.serve.commands.explain.cuda_device", lambda: None)
    h200 = ("hardware=h200", "hardware.threads=4", "passes.measure=true")
    text = explained(*h200)
    assert text.startswith("# no h200 here: nothing is compiled or measured")
    for title in ("kernels, any step", "kernels, up to 8 tokens"):
        assert text.count(title) == 1
    small = text[text.index("kernels, up to 8 tokens") :]
    large = text[text.index("kernels, any step") : text.index("passes, up to 8 tokens")]
    assert "compiled x" in large
    assert "linear.triton" in small
    for part in large, small:
        assert "triton" in part
        assert ".reference" not in part
    assert "linear by torch x" in explained(*h200, "passes.compile=false")
    assert explained(*h200, show="place_state").count("# before PlaceState") == 2
    with pytest.raises(ConfigError, match="no such device answers here"):
        explained(*h200, prove=True)


def test_a_shown_program_is_python_whatever_the_width() -> None:
    console = Console(file=io.StringIO(), width=40)
    assert run(resolved(tiny("llama"), (*PLAIN, "passes.compile=false")), console, show="fuse_add_norm") == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("# before FuseAddNorm()")
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert defined == ["embed", "layer0", "head"] * 2


def test_a_pass_that_this_pipeline_leaves_out_is_told_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"--show=compile: not a pass of this deployment's pipeline; it has .*norm"):
        explained("passes.compile=false", show="compile")


def test_a_deterministic_deployment_has_one_program_of_invariant_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = CapturingBackend()
    monkeypatch.setattr("treadle.runtime.build.device", lambda resolved: backend)
    text = explained("passes.deterministic=true", f"passes.compile_cache={tmp_path}")
    assert "up to 8 tokens" not in text
    for kernel in ("linear.cpp_invariant", "paged_attention.cpp_invariant"):
        assert kernel in text
