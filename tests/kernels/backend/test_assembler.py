from __future__ import annotations

import os
import sys

import pytest
import triton

from treadle.kernels.backend import assembler
from treadle.kernels.backend.assembler import PATH, choose_assembler


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set, and then deleted: so that it is put back however the test leaves it.
    monkeypatch.setenv(PATH, "")
    monkeypatch.delenv(PATH)


def test_one_that_is_known_to_be_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own, newer = triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell
    monkeypatch.setattr(assembler, "LEAST", (int(own.version.split(".")[0]), int(own.version.split(".")[1]) + 1))
    assert choose_assembler() == newer.version
    assert triton.knobs.nvidia.ptxas.path == newer.path
    assert choose_assembler() == newer.version


def test_one_that_is_new_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = triton.knobs.nvidia.ptxas
    monkeypatch.setattr(assembler, "LEAST", tuple(int(part) for part in own.version.split(".")))
    assert choose_assembler() == own.version
    assert PATH not in os.environ


def test_what_the_environment_names_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    own = triton.knobs.nvidia.ptxas
    monkeypatch.setenv(PATH, own.path)
    monkeypatch.setattr(assembler, "LEAST", (99,))
    assert choose_assembler() == own.version
    assert os.environ[PATH] == own.path


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_assembler() is None
