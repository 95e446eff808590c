"""Compiled bodies: right for any number of tokens, kept on disk, and writing the arena in place."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import VOCAB, Toy, load

from treadle.conf.schema import PassesConfig
from treadle.graph.ir import Graph
from treadle.graph.program import Executable, StepInputs
from treadle.graph.target import Target
from treadle.passes.compile import Compile, CompileError
from treadle.passes.pipeline import pipeline
from treadle.passes.prove import row_error
from treadle.passes.runner import run_passes

TARGET = Target(device="cpu", page_tokens=4)
ARENA_BYTES = 1 << 28


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def graphs(cache: Path) -> tuple[Graph, Graph]:
    lowered = run_passes(pipeline(PassesConfig(quantize="none", compile=False), TARGET), Toy().graph())
    return lowered, Compile(target=TARGET, cache=str(cache))(lowered)


def step(graph: Graph, num_tokens: int) -> StepInputs:
    pages = graph.state.full.pages_for(64)
    return StepInputs(
        token_ids=torch.arange(num_tokens) % VOCAB,
        positions=torch.arange(num_tokens),
        seq_ids=torch.zeros(num_tokens, dtype=torch.int32),
        q_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens=torch.tensor([num_tokens], dtype=torch.int32),
        page_tables=(torch.arange(pages, dtype=torch.int32).view(1, 1, -1) + 1) * graph.state.full.page_units,
        blocks=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.arange(num_tokens),
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 64])
def test_compiled_equals_uncompiled_for_any_number_of_tokens(graphs: tuple[Graph, Graph], num_tokens: int) -> None:
    logits = []
    for graph in graphs:
        arena = torch.zeros(20 * graph.state.full.page_bytes, dtype=torch.uint8)
        logits.append(Executable(graph, load(graph.weights), arena).forward(step(graph, num_tokens)))
    assert row_error(*logits) < 2e-5


def test_artifacts_are_kept_and_reused(
    graphs: tuple[Graph, Graph], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered, compiled = graphs
    assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == len(compiled.bodies)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    again = Compile(target=TARGET, cache=str(cache))(lowered)
    arena = torch.zeros(20 * lowered.state.full.page_bytes, dtype=torch.uint8)
    assert Executable(again, load(again.weights), arena).forward(step(again, 5)).isfinite().all()


def test_artifacts_are_found_whatever_order_a_process_gives_a_set() -> None:
    class Reversed(frozenset[str]):
        def __repr__(self) -> str:
            return repr(sorted(self, reverse=True))

    traced = torch.fx.symbolic_trace(torch.nn.Identity())
    keys = {
        Compile(target=replace(TARGET, features=kind(["avx2", "amx"])), cache="unused")._key(traced, [], None)
        for kind in (frozenset, Reversed)
    }
    assert len(keys) == 1


def test_a_compiled_step_never_copies_the_arena(graphs: tuple[Graph, Graph]) -> None:
    _, compiled = graphs
    arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
    executable = Executable(compiled, load(compiled.weights), arena)
    # A peak only grows: an arena copied in the very first step must not hide the next one.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    executable.forward(step(compiled, 64))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < ARENA_BYTES // 8
    assert arena.count_nonzero() > 0


@pytest.mark.parametrize("max_tokens", [None, 8])
def test_bodies_with_nothing_to_fuse_stay_uncompiled_where_steps_are_captured(
    graphs: tuple[Graph, Graph], max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered, _ = graphs
    made = list[str]()
    monkeypatch.setattr(Compile, "_compile", lambda self, body, graph: made.append(body.name))
    again = Compile(target=replace(TARGET, max_tokens=max_tokens), cache="unused")(lowered)
    # A choice of rows and one product are all of the head.
    assert made == [name for name in lowered.bodies if max_tokens is None or name != "head"]
    assert again.bodies["head"].graph is lowered.bodies["head"].graph


def test_inputs_stand_on_the_device_that_the_body_is_compiled_for(
    graphs: tuple[Graph, Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is traced for a GPU has no tensor left on the CPU, though graphs are written without a device."""
    devices = set[str]()

    def look(traced: torch.fx.GraphModule, *_: object, **__: object) -> None:
        values = [node.meta.get("val") for node in traced.graph.nodes]
        devices.update(value.device.type for value in values if isinstance(value, torch.Tensor))
        raise StopIteration

    monkeypatch.setattr(torch._inductor, "standalone_compile", look)
    with pytest.raises(CompileError):
        Compile(target=replace(TARGET, device="cuda"), cache=str(tmp_path))(graphs[0])
    assert devices == {"cuda"}


def test_no_compiler_is_one_line_that_says_what_to_do(
    graphs: tuple[Graph, Graph], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor asks for it even where everything is compiled already."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(
        CompileError, match=r"^passes\.compile: no C\+\+ compiler .*install g\+\+.*passes\.compile=false"
    ) as caught:
        Compile(target=TARGET, cache=str(cache))(graphs[0])
    assert "\n" not in str(caught.value)


def test_a_compiler_that_fails_is_one_line_that_names_body_and_reason(
    graphs: tuple[Graph, Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\ntest "$1" = --version || { echo "x.cpp: error: it is broken"; exit 1; }\necho g++ 13\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(
        CompileError, match=r"embed cannot be compiled: .*it is broken; .*passes\.compile=false"
    ) as caught:
        Compile(target=TARGET, cache=str(tmp_path / "cache"))(graphs[0])
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(graphs: tuple[Graph, Graph], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CompileError, match=r"Not a directory.*file.*passes\.compile=false"):
        Compile(target=TARGET, cache=str(tmp_path / "file" / "cache"))(graphs[0])
