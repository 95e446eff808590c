"""Compiled artifacts on disk: made beside their place, checked before use, made again when damaged.

An artifact is a folder. It is renamed into place as a whole, with the hashes of its files in CHECKSUMS, so that a
folder cut short (a full disk, a crash) is never loaded: a library that is shorter than it says kills the process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch._inductor.standalone_compile import CompiledArtifact
    from torch.fx import GraphModule

Input = torch.Tensor | int | torch.SymInt | None

_log = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"
"""the file of an artifact that lists the others and is written last"""

ARTIFACT_BYTES = 4 << 20
"""more than an artifact takes"""


def load_or_compile(path: Path, traced: GraphModule, inputs: Sequence[Input]) -> CompiledArtifact:
    """Return the artifact kept at ``path``; if there is none, or it is damaged, compile ``traced`` and keep it there.

    Several processes may do so at once; the first one's is kept. Raises whatever inductor raises.
    """
    return _load_whole(path) or _compile(path, traced, inputs)


def _load_whole(path: Path) -> CompiledArtifact | None:
    """Return the artifact if there is one that is whole and loads; what is not goes."""
    if not path.exists():
        return None
    if _is_whole(path):
        try:
            return _load(path)
        except Exception as error:
            _log.warning("%s does not load and is compiled again: %s: %s", path, type(error).__name__, error)
    else:
        _log.warning("%s is damaged and is compiled again", path)
    # Out of the way at once, so that nobody finds half of it.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".old-") as folder, suppress(FileNotFoundError):
        path.rename(Path(folder) / path.name)
    return None


def _compile(path: Path, traced: GraphModule, inputs: Sequence[Input]) -> CompiledArtifact:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / path.name
        try:
            _write(fresh, traced, inputs)
        except Exception as error:
            # Inductor goes on where it cannot write, and stumbles later over what is missing.
            if shutil.disk_usage(folder).free < ARTIFACT_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.parent)) from error
            raise
        try:
            fresh.rename(path)
        except OSError:
            # Another process was first.
            if not _is_whole(path):
                raise
    return _load(path)


def _write(fresh: Path, traced: GraphModule, inputs: Sequence[Input]) -> None:
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    fresh.mkdir()
    # All that inductor keeps is written where it will stay; nothing is taken from the cache that it has for everybody.
    with (
        torch._inductor.config.patch(compile_threads=1),
        temporary_cache_dir(str(fresh)),
        warnings.catch_warnings(),
    ):
        # fp32 products are IEEE's by choice
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        torch._inductor.standalone_compile(traced, list(inputs), dynamic_shapes="from_graph")
    # What loading adds is part of it too.
    _load(fresh)
    _seal(fresh)


def _load(path: Path) -> CompiledArtifact:
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=str(path), format="unpacked")


def _seal(folder: Path) -> None:
    """Write the hashes of all files, and have everything on the disk before the folder gets its name."""
    sums = {str(file.relative_to(folder)): _hash(file) for file in _files(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=0, sort_keys=True))
    for file in _files(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _is_whole(folder: Path) -> bool:
    """Return whether every file is as it was when the artifact was made; files added since do not matter."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        return bool(sums) and all(_hash(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
