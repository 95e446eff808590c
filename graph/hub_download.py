"""Bring one file of the hub into huggingface_hub's cache, going on where an earlier start was interrupted.

The library resumes within one call only. So a file that comes over plain HTTP is brought beside its place in the
cache first, in parts if need be, and the library then finds it there. What it transfers by chunks (Xet) is left to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from treadle.conf.errors import ConfigError
from treadle.graph.hub_errors import is_away

_RESUMED_FROM = 1 << 20
"""bytes from which on a file is worth resuming"""
_TRIALS = 3
_PAUSE_S = 1.0


def download(hub: ModuleType, repo: str, commit: str, file: str, size: int | None, blobs: Path) -> None:
    """Bring a file into the cache, whose contents by hash are in ``blobs``. Raises what huggingface_hub raises."""
    if size is None or size >= _RESUMED_FROM:
        _bring(hub, repo, commit, file, blobs)
    hub.hf_hub_download(repo, file, revision=commit)


def _bring(hub: ModuleType, repo: str, commit: str, file: str, blobs: Path) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hub.hf_hub_url(repo, file, revision=commit)
    found = hub.get_hf_file_metadata(url)
    if found.xet_file_data is not None or not found.etag or not found.size:
        return
    blob = blobs / found.etag
    blobs.mkdir(parents=True, exist_ok=True)
    part = blobs / f"{found.etag}.treadle.incomplete"
    with part.open("ab") as sink:
        fcntl.flock(sink, fcntl.LOCK_EX)
        # Another start may have finished it while this one waited: then this handle is of a file that is gone.
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        begun = sink.tell()
        if begun > found.size:
            begun = sink.truncate(0)

        def get() -> None:
            http_get(url, sink, resume_size=sink.tell(), headers=build_hf_headers(), expected_size=found.size)

        _persist(get, sink.tell, hub)
        sink.flush()
        if begun and not _is_whole(part, found.etag):
            part.unlink()
            raise ConfigError(
                f"{file} was resumed and is not what the hub has", key="model.path", value=repo, hint="start again"
            )
        os.replace(part, blob)


def _persist(get: Callable[[], None], done: Callable[[], int], hub: ModuleType) -> None:
    """Call ``get`` again when its connection broke, until several trials in a row have brought nothing."""
    fruitless = 0
    while True:
        before = done()
        try:
            return get()
        except Exception as error:
            fruitless = 0 if done() > before else fruitless + 1
            if fruitless == _TRIALS or not is_away(error, hub):
                raise
            time.sleep(_PAUSE_S)


def _is_whole(part: Path, etag: str) -> bool:
    """Whether a file has the content that its hash says; a hash that is no SHA-256 says nothing."""
    if not re.fullmatch(r"[0-9a-f]{64}", etag):
        return True
    with part.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == etag
