"""What a ``model.path`` that is no path names on the hub: a repository, and which of its GGUF files if it has several.

``org/name``, ``org/name:Q4_K_M`` (a quantisation, as llama.cpp's users write it) or ``org/name/file.gguf``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle.conf.errors import ConfigError, nearest

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+)|/(?P<file>[^:]+\.gguf))?")
_LABEL = re.compile(r"(?:.*[-._])?((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))", re.IGNORECASE)
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")


@dataclass(frozen=True)
class HubName:
    """A repository, and what was said about its file."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.repo + (f":{self.quant}" if self.quant else f"/{self.file}" if self.file else "")


def hub_name(path: str) -> HubName | None:
    """Return what ``path`` names on the hub; None if it is a path: there is such a file, or it does not look so."""
    match = _NAME.fullmatch(path)
    if match is None or Path(path).exists() or match["repo"].endswith((".gguf", ".safetensors", ".json")):
        return None
    return HubName(match["repo"], match["quant"], match["file"])


def choose_gguf(name: HubName, files: Iterable[str]) -> str | None:
    """Return the GGUF file, or the first of its shards, that ``name`` means among a repository's; None if it has none.

    Raises: ConfigError naming the ones there are, if none is meant or several are.
    """
    wanted = name.file
    found = sorted(file for file in files if file.endswith(".gguf"))
    if wanted is not None:
        if wanted not in found:
            close = [f"model.path={name.repo}/{file}" for file in nearest(wanted, found)]
            raise ConfigError("the repository has no such file", key="model.path", value=name, nearest=close)
        return wanted
    models = {file: stem for file in found if "mmproj" not in file.lower() and (stem := _stem(file)) is not None}
    if name.quant is not None:
        boundary = re.compile(rf"(?:.*[-._/])?{re.escape(name.quant)}(?:[-.].*)?", re.IGNORECASE)
        models = {file: stem for file, stem in models.items() if boundary.fullmatch(stem)}
        exact = {file: stem for file, stem in models.items() if stem.lower().endswith(name.quant.lower())}
        models = exact if len(exact) == 1 else models
    if len(models) == 1:
        return next(iter(models))
    if not found:
        return None
    labels = sorted({_label(stem) for file in found if (stem := _stem(file)) is not None} - {""})
    likely = nearest(name.quant.upper() if name.quant else "Q4_K_M", labels)
    raise ConfigError(
        f"{len(models)} GGUF files have this name" if models else "no GGUF file has this name",
        key="model.path",
        value=name,
        nearest=[f"model.path={name.repo}:{label}" for label in likely],
        hint=f"the repository has {', '.join(labels or found[:10])}",
    )


def _stem(file: str) -> str | None:
    """Return a file's name without suffix and shard number; None for a shard that is not the first."""
    stem = file.removesuffix(".gguf")
    shard = _SHARD.search(stem)
    if shard is None:
        return stem
    return stem[: shard.start()] if shard[1] == "00001" else None


def _label(stem: str) -> str:
    match = _LABEL.fullmatch(stem.rpartition("/")[2])
    return match[1] if match else ""
