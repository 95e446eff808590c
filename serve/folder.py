"""The private folder of one server, and what servers that were killed left of theirs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treadle.runtime.protocol import Endpoints

PREFIX = "treadle-serve-"


@contextmanager
def private_folder() -> Iterator[Endpoints]:
    """Give the addresses inside a new folder, which is gone afterwards.

    The folder is locked as long as this process lives, however it ends, so that the next server knows which to sweep.
    """
    _sweep(Path(tempfile.gettempdir()))
    endpoints = Endpoints(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(endpoints.folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield endpoints
    finally:
        shutil.rmtree(endpoints.folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders in ``parent`` whose server is dead: nobody locks them."""
    for folder in parent.glob(f"{PREFIX}*"):
        # Files are written under the lock: a folder without one may be about to be locked.
        # OSError: locked, gone meanwhile, or another user's.
        with suppress(OSError):
            if not any(folder.iterdir()):
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
