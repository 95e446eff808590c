from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import triton
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir, triton_cache_dir

from treadle.kernels.backend import kernel_cache, open_backend
from treadle.kernels.backend.kernel_cache import FOLDER, keep_kernels


@pytest.fixture(autouse=True)
def nobody_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(kernel_cache, "_named", None)


def test_kernels_stay_where_they_are_kept_while_inductor_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep_kernels(tmp_path / "triton")
    with temporary_cache_dir(str(tmp_path / "artifact")):
        assert triton_cache_dir(0) == str(tmp_path / "triton")
    assert triton.knobs.cache.dir == str(tmp_path / "triton")
    # Another deployment in the same process keeps its own.
    monkeypatch.chdir(tmp_path)
    keep_kernels(Path("other"))
    assert triton.knobs.cache.dir == str(tmp_path / "other")


def test_a_folder_that_the_environment_names_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_cache, "_named", "/mine")
    monkeypatch.setenv(FOLDER, "/mine")
    keep_kernels(tmp_path)
    assert os.environ[FOLDER] == "/mine"


@pytest.mark.gpu
def test_the_backend_of_a_deployment_keeps_kernels_beside_compiled_bodies(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    open_backend("cuda", threads=1, cache=tmp_path)
    assert triton.knobs.cache.dir == str(tmp_path / "triton")
