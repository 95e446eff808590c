"""Builds and loads the C++ files of this folder: one shared library each, plain C functions, called through ctypes.

A library is compiled once per machine and kept under ``$XDG_CACHE_HOME/treadle/kernels``, in a folder named by a hash
of what its code depends on; its own name holds the hash of its content, so that one damaged since is built anew and
never mapped. What is built needs no compiler. It uses the OpenMP runtime that torch has loaded: one thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch  # its OpenMP runtime must be loaded before a library that needs one

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared", "-w")
COMPILERS = ("g++", "clang++", "c++")

DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types as the C++ side numbers them."""

POINTER = ctypes.c_void_p
INT = ctypes.c_int
LONG = ctypes.c_int64
FLOAT = ctypes.c_float


class KernelBuildError(RuntimeError):
    """A C++ kernel that cannot be built here: why, and what to do. References serve in its place."""


def compiler() -> str:
    """Return the path of the C++ compiler: ``$CXX``, else the first of COMPILERS. Raises: KernelBuildError."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    for name in wanted:
        found = shutil.which(name)
        if found:
            return found
    raise KernelBuildError(f"no C++ compiler ({', '.join(wanted)}) on PATH; install g++ or clang++, or set CXX")


@functools.cache
def compiler_version(tool: str) -> str:
    """Return the first line of ``tool --version``."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def cache_folder() -> Path:
    """Return where built libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "treadle" / "kernels"


def cpu_identity() -> str:
    """Return what ``-march=native`` depends on: the processor's model and features."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    first = info.read_text().split("\n\n", 1)[0].splitlines()
    return platform.machine() + "\n".join(line for line in first if line.startswith(wanted))


def build(source: Path) -> Path:
    """Return the shared library of a C++ file, compiling it unless it is in the cache. Raises: KernelBuildError."""
    digest = hashlib.sha256()
    # A compiler that the user names is part of the choice, wherever it is; without one any compiler's library will do.
    for part in (os.environ.get("CXX", ""), *FLAGS, cpu_identity()):
        digest.update(part.encode() + b"\0")
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    folder = cache_folder() / digest.hexdigest()[:24]
    try:
        return _kept(folder, source.stem) or _compile(source, folder)
    except OSError as error:
        raise KernelBuildError(f"cannot keep the library of {source.name} under {folder}: {error}") from error


def _kept(folder: Path, stem: str) -> Path | None:
    """Return a library in ``folder`` that is as it was built; others go."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if path.name == _name(stem, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _compile(source: Path, folder: Path) -> Path:
    tool = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed: another process, or one after a crash, sees all of it or nothing.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / f"{source.stem}.so"
        done = subprocess.run([tool, *FLAGS, str(source), "-o", str(fresh)], capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(f"{tool} failed on {source}:\n{done.stderr.strip()[-2000:]}")
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        return fresh.rename(folder / _name(source.stem, fresh.read_bytes()))


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Return the loaded library of ``name``.cpp in this folder. Raises: KernelBuildError."""
    return open_library(FOLDER / f"{name}.cpp")


def open_library(source: Path) -> ctypes.CDLL:
    """Return the loaded library of a C++ file; one that does not load is built anew, once. Raises: KernelBuildError."""
    path = build(source)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # Whole, yet not for this system: made by another compiler, or where the C library was newer.
        _log.warning("%s does not load and is built again: %s", path, error)
    try:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(build(source)))
    except OSError as error:
        raise KernelBuildError(f"cannot load {path}: {error}") from error


@functools.cache
def usable(name: str) -> bool:
    """Return whether ``name``.cpp can be built and loaded here; warns once, with the reason, if not."""
    try:
        load(name)
    except KernelBuildError as error:
        _log.warning("the C++ kernels of %s are off, plain torch serves: %s", name, error)
        return False
    return True


def function(name: str, symbol: str, arguments: Sequence[type]) -> Callable[..., None]:
    """Return the C function ``symbol`` of ``name``.cpp, which takes ``arguments`` and returns nothing.

    Raises: KernelBuildError.
    """
    found = load(name)[symbol]
    found.argtypes = list(arguments)
    found.restype = None
    return found
