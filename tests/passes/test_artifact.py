"""Artifacts are whole or made again, whatever happened to the disk or is done by another process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.passes import artifact
from treadle.passes.artifact import CHECKSUMS, load_or_compile

INPUT = torch.arange(40.0)


@pytest.fixture(scope="module")
def traced() -> GraphModule:
    return make_fx(lambda x: (torch.sin(x) * 2 + 1,))(INPUT)


@pytest.fixture(scope="module")
def made(traced: GraphModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "made"
    load_or_compile(path, traced, [INPUT])
    return path


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    """An artifact that no process has loaded."""
    return Path(shutil.copytree(made, tmp_path / "cache" / "kept"))


class Compiler(NamedTuple):
    """Counts how often inductor is asked."""

    calls: list[int]

    def right(self, path: Path, traced: GraphModule) -> bool:
        (found,) = load_or_compile(path, traced, [INPUT])(INPUT)
        return torch.allclose(found, torch.sin(INPUT) * 2 + 1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    real, calls = torch._inductor.standalone_compile, list[int]()

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch._inductor, "standalone_compile", count)
    return Compiler(calls)


def cut(path: Path) -> None:
    os.truncate(next(path.rglob("*.so")), 5000)


def lose(path: Path) -> None:
    next(path.rglob("*.so")).unlink()


def stop_midway(path: Path) -> None:
    (path / CHECKSUMS).unlink()


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def not_for_this_torch(path: Path) -> None:
    """Whole, but it does not load."""
    entry = next(file for file in (path / "aotautograd").rglob("*") if file.is_file())
    entry.write_bytes(b"nothing that can be read")
    artifact._seal(path)


@pytest.mark.parametrize("damage", [cut, lose, stop_midway, empty, not_for_this_torch])
@pytest.mark.filterwarnings("ignore")
def test_what_is_damaged_is_compiled_again_once(
    kept: Path, traced: GraphModule, compiler: Compiler, damage: Callable[[Path], None]
) -> None:
    damage(kept)
    assert compiler.right(kept, traced)
    assert len(compiler.calls) == 1
    assert compiler.right(kept, traced)
    assert len(compiler.calls) == 1
    assert list(kept.parent.iterdir()) == [kept]


def test_loading_writes_nothing(kept: Path, traced: GraphModule, compiler: Compiler) -> None:
    """So what is renamed into place is all that there will be."""
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    assert compiler.right(kept, traced)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*")} == before
    assert compiler.calls == []


def test_of_two_processes_that_start_at_once_the_first_is_kept(
    made: Path, tmp_path: Path, traced: GraphModule, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seal = tmp_path / "cache" / "both", artifact._seal

    def seal_late(folder: Path) -> None:
        seal(folder)
        shutil.copytree(made, path)

    monkeypatch.setattr(artifact, "_seal", seal_late)
    assert compiler.right(path, traced)
    assert len(compiler.calls) == 1
    assert list(path.parent.iterdir()) == [path]
    assert (path / CHECKSUMS).read_bytes() == (made / CHECKSUMS).read_bytes()


def test_a_full_disk_is_named_though_inductor_goes_on(
    tmp_path: Path, traced: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        load_or_compile(tmp_path / "cache" / "full", traced, [INPUT])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, (1 << 30) - 4096, 4096))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="No space left on device"):
        load_or_compile(tmp_path / "cache" / "full", traced, [INPUT])
    assert list((tmp_path / "cache").iterdir()) == []
