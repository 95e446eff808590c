import ctypes
from pathlib import Path

import pytest
import torch

from treadle.kernels import native
from treadle.kernels.native import KernelBuildError

SOURCE = '#include <cstdint>\nextern "C" void answer(int64_t* x) { *x = 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def answer(path: Path) -> int:
    value = ctypes.c_int64(0)
    ctypes.CDLL(str(path)).answer(ctypes.byref(value))
    return value.value


def test_a_library_is_built_once_and_changes_with_its_source(source: Path, tmp_path: Path):
    first = native.build(source)
    assert first.is_relative_to(tmp_path / "cache" / "treadle" / "kernels")
    assert answer(first) == 42
    stamp = first.stat().st_mtime_ns
    assert native.build(source) == first
    assert first.stat().st_mtime_ns == stamp
    source.write_text(SOURCE.replace("42", "43"))
    second = native.build(source)
    assert second != first
    assert answer(second) == 43


def test_a_library_changes_with_a_header_beside_it(source: Path):
    first = native.build(source)
    (source.parent / "shared.h").write_text("// a header\n")
    assert native.build(source) != first


def test_nothing_half_built_is_left(source: Path):
    built = native.build(source)
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_compiler_that_fails_is_quoted(source: Path):
    source.write_text("this is not C++\n")
    with pytest.raises(KernelBuildError, match=r"(?s)answer\.cpp.*error"):
        native.build(source)


def test_no_compiler_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(KernelBuildError, match="install g"):
        native.build(source)


def test_a_wrong_cxx_is_named(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        native.build(source)


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    with pytest.raises(KernelBuildError, match=r"answer\.cpp"):
        native.build(source)


def test_a_missing_compiler_turns_a_kernel_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fresh = native.usable.__wrapped__
    native.load.cache_clear()
    with caplog.at_level("WARNING"):
        assert not fresh("linear")
    assert "no-such-compiler" in caplog.text
    native.load.cache_clear()


def test_there_is_one_openmp_runtime():
    native.load("linear")
    torch.ones(1 << 20).sum()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in mapped if "libgomp" in line}
    assert len(loaded) == 1
