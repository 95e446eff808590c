from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from triton.backends.nvidia import compiler

from treadle.kernels.backend import assembler
from treadle.kernels.backend.assembler import PATH, choose_assembler, driver_major

AMPERE, HOPPER, BLACKWELL = 80, 90, 100
DRIVER = 99
"""loads what any assembler makes"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set, and then deleted: so that it is put back however the test leaves it.
    monkeypatch.setenv(PATH, "")
    monkeypatch.delenv(PATH)


@pytest.fixture
def own_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = numbers(triton.knobs.nvidia.ptxas.version)
    monkeypatch.setattr(assembler, "LEAST", (major, minor + 1))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@pytest.mark.usefixtures("own_is_wrong")
def test_one_that_is_known_to_be_wrong_is_not_used() -> None:
    newer = triton.knobs.nvidia.ptxas_blackwell
    assert choose_assembler(AMPERE, DRIVER) == newer.version
    assert triton.knobs.nvidia.ptxas.path == newer.path
    assert choose_assembler(AMPERE, DRIVER) == newer.version


def test_one_that_is_new_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = triton.knobs.nvidia.ptxas
    monkeypatch.setattr(assembler, "LEAST", numbers(own.version))
    assert choose_assembler(AMPERE, DRIVER) == own.version
    assert PATH not in os.environ


@pytest.mark.usefixtures("own_is_wrong")
def test_one_whose_code_the_driver_does_not_load_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    own, newer = triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell
    driver = numbers(newer.version)[0]
    assert choose_assembler(AMPERE, driver - 1) == own.version
    assert PATH not in os.environ
    assert f"ptxas {own.version} gives wrong code for some kernels" in caplog.text
    caplog.clear()
    assert choose_assembler(AMPERE, driver) == newer.version
    assert not caplog.text


@pytest.mark.parametrize("arch", [AMPERE, HOPPER, BLACKWELL])
def test_the_version_is_that_of_the_one_triton_takes(arch: int) -> None:
    assert choose_assembler(arch, DRIVER) == compiler.get_ptxas(arch).version


def test_what_the_environment_names_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    own = triton.knobs.nvidia.ptxas
    monkeypatch.setenv(PATH, own.path)
    monkeypatch.setattr(assembler, "LEAST", (99,))
    assert choose_assembler(AMPERE, DRIVER) == own.version
    assert os.environ[PATH] == own.path


@pytest.mark.usefixtures("own_is_wrong")
def test_a_path_at_which_nothing_is_does_not_bring_the_wrong_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = triton.knobs.nvidia.ptxas_blackwell
    monkeypatch.setenv(PATH, "/nowhere/ptxas")
    assert choose_assembler(AMPERE, DRIVER) == newer.version


@pytest.mark.parametrize("made", ["missing", "not executable"])
@pytest.mark.usefixtures("own_is_wrong")
def test_an_installation_may_lack_the_newer_one(made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, path = triton.knobs.nvidia.ptxas, tmp_path / "ptxas"
    if made == "not executable":
        path.touch()
    monkeypatch.setattr(type(triton.knobs.nvidia).__dict__["ptxas_blackwell"], "default_path", str(path))
    assert choose_assembler(AMPERE, DRIVER) == own.version


def test_without_any_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(triton.knobs.nvidia).__dict__["ptxas"], "default_path", "/nowhere/ptxas")
    assert choose_assembler(AMPERE, DRIVER) is None


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_assembler(AMPERE, DRIVER) is None


def test_the_driver_says_what_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(version: ctypes.c_int) -> int:
        version._obj.value = 12080  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=tell))
    assert driver_major() == 12
