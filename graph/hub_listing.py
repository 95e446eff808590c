"""What a commit of a hub repository holds, kept, so that a pinned or an offline start asks nobody."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle.conf.cache import cache_dir

_MAIN = "main"


@dataclass(frozen=True)
class Listing:
    """A commit and its files with their sizes (None: unknown)."""

    commit: str
    files: Mapping[str, int | None]


def remember(repo: str, revision: str | None, listing: Listing) -> Listing:
    """Keep a listing, as what ``revision`` stands for now, and return it."""
    kept = _read(repo)
    kept["refs"][revision or _MAIN] = listing.commit
    kept["commits"][listing.commit] = dict(listing.files)
    path = _path(repo)
    # A cache that cannot be written costs a question the next time.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            json.dump(kept, scratch)
        os.replace(scratch.name, path)
    return listing


def recall(repo: str, revision: str | None, hub: ModuleType) -> Listing | None:
    """Return the listing of a branch, tag or commit as it was last seen, or as other tools left it in the cache."""
    kept, revision = _read(repo), revision or _MAIN
    commit = kept["refs"].get(revision, revision)
    if commit in kept["commits"]:
        return Listing(commit, kept["commits"][commit])
    config = hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    # A cache that another tool filled: it may lack files, so it is good for this start and is not kept.
    return Listing(folder.name, dict(sorted(files.items())))


def _path(repo: str) -> Path:
    return cache_dir() / "hub" / f"{repo.replace('/', '--')}.json"


def _read(repo: str) -> dict[str, Any]:
    try:
        kept = json.loads(_path(repo).read_text())
        return {"refs": dict(kept["refs"]), "commits": dict(kept["commits"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"refs": {}, "commits": {}}
