import ctypes
import hashlib
import os
import subprocess
import sys
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


@pytest.mark.parametrize("keep", [0, 1000])
def test_a_library_cut_short_is_built_again(source: Path, keep: int):
    """It would kill the process with SIGBUS as soon as it is mapped."""
    built = native.build(source)
    os.truncate(built, keep)
    again = native.build(source)
    assert answer(again) == 42
    assert list(again.parent.iterdir()) == [again]


def test_a_library_that_does_not_load_is_built_again_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Whole, but made where a library was there that is missing here."""
    ill = source.with_name("ill.cpp")
    ill.write_text('extern "C" void nowhere(); extern "C" void* answer() { return (void*)nowhere; }\n')
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-Wl,-z,now"))
    stranger, mine = native.build(ill), native.build(source)
    content = stranger.read_bytes()
    mine.unlink()
    bad = mine.with_name(f"answer-{hashlib.sha256(content).hexdigest()[:32]}.so")
    bad.write_bytes(content)
    assert native.build(source) == bad, "nothing but loading shows it"
    value = ctypes.c_int64(0)
    native.open_library(source).answer(ctypes.byref(value))
    assert value.value == 42
    assert not bad.exists()
    with pytest.raises(KernelBuildError, match="cannot load"):
        native.open_library(ill)
    assert caplog.text.count("built again") == 2


def test_what_is_built_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    built = native.build(source)
    monkeypatch.setenv("PATH", str(source.parent))
    assert native.build(source) == built


def test_a_compiler_that_is_named_has_libraries_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    built = native.build(source)
    monkeypatch.setenv("CXX", native.compiler())
    assert native.build(source).parent != built.parent


def test_first_starts_at_once_all_work(source: Path):
    code = f"from pathlib import Path; from treadle.kernels import native; native.open_library(Path({str(source)!r}))"
    starts = [subprocess.Popen([sys.executable, "-P", "-c", code]) for _ in range(2)]
    assert [start.wait(timeout=120) for start in starts] == [0, 0]
    assert answer(native.build(source)) == 42


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
