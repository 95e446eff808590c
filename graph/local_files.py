"""Files and folders that a deployment names for its state: whether an engine here will be able to use them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from treadle.conf.connector import KEY, PeerOptions, read_connectors
from treadle.conf.errors import ConfigError
from treadle.conf.schema import KVConfig


def refuse_unusable_files(kv: KVConfig) -> None:
    """Raise ConfigError for a folder that cannot be made or written, or a secret that cannot be read.

    Nothing stays behind: where a folder would be made, one of another name is made and removed.
    """
    if kv.disk.path is not None:
        _refuse_folder(Path(kv.disk.path).expanduser().absolute(), kv.disk.path)
    for index, connector in enumerate(read_connectors(kv.connectors)):
        options = connector.options
        if isinstance(options, PeerOptions) and options.secret_file is not None:
            read_secret(f"{KEY}[{index}].secret_file", options.secret_file)


def _refuse_folder(folder: Path, given: str) -> None:
    key, hint = "kv.disk.path", "kv.disk.path=null: no disk"
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        if not there.is_dir():
            problem = "not a folder" if there == folder else f"{there} is not a folder"
            raise ConfigError(problem, key=key, value=given, hint=hint)
        tempfile.TemporaryDirectory(prefix=".treadle-", dir=there).cleanup()
    except OSError as error:
        problem = f"cannot be {'written' if there == folder else 'made'}: {error.strerror}"
        raise ConfigError(problem, key=key, value=given, hint=hint) from None


def read_secret(key: str, path: str) -> bytes:
    """Return what the file holds, without white space around it. Raises ConfigError, naming ``key``, if that cannot be
    read or is nothing."""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=key, value=path) from None
    if not secret:
        raise ConfigError("empty", key=key, value=path, hint="null: none is asked for")
    return secret
