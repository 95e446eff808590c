"""Lock files: a resolved deployment written down, read back as the same deployment, and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from treadle.conf.errors import ConfigError, sibling
from treadle.conf.load import from_tree, typed_tree
from treadle.conf.override import PRESET, check_overrides, parse_override, unknown_key, wrong_type
from treadle.conf.schema import Deployment
from treadle.conf.secret import seal

_FORMAT = 1
_HEADER = "# A resolved deployment. The same server again: treadle serve --lock {name}\n"


def fingerprint(deployment: Deployment) -> str:
    """Return ``fp_`` and a hash of what can change an answer: all but addresses, keys, cache folders, benchmarks."""
    tree = to_plain(deployment)
    del tree["serve"], tree["bench"], tree["passes"]["compile_cache"]
    if tree["model"]["content"] is not None:  # then where the checkpoint lies does not matter
        del tree["model"]["path"], tree["model"]["revision"]
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]


def to_plain(deployment: Deployment) -> dict[str, Any]:
    """Return the deployment as mappings, lists and scalars, the API key sealed."""
    tree = json.loads(json.dumps(dataclasses.asdict(deployment)))
    assert isinstance(tree, dict)
    if deployment.serve.api_key is not None:
        tree["serve"]["api_key"] = seal(deployment.serve.api_key)
    return tree


def to_lock(deployment: Deployment, facts: Mapping[str, Any] | None = None, name: str = "FILE") -> str:
    """Return the text of a lock file. ``facts`` are for the reader: sizes, counts, versions."""
    body = {
        "lock": _FORMAT,
        "treadle": version("treadle"),
        "fingerprint": fingerprint(deployment),
        "deployment": to_plain(deployment),
        "facts": dict(facts or {}),
    }
    return _HEADER.format(name=name) + OmegaConf.to_yaml(OmegaConf.create(body))


def from_lock(path: str | Path, overrides: Sequence[str] = ()) -> Deployment:
    """Return the deployment of a lock file, with ``overrides`` (``group.key=value`` only) on top.

    Raises ConfigError if it is not one, was edited by hand, or an override is not valid.
    """
    lock = _read(Path(path))
    tree = typed_tree()
    try:
        tree.merge_with(lock.deployment)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise unknown_key(error.full_key or "").within(Path(path)) from error
    except OmegaConfBaseException as error:
        raise wrong_type(error.full_key or "", error.value).within(Path(path)) from error
    deployment = from_tree(tree)
    if fingerprint(deployment) != lock.fingerprint:
        raise ConfigError(
            f"edited by hand: it says {lock.fingerprint} and holds {fingerprint(deployment)}",
            key="--lock",
            value=path,
            hint="take it as it was and give changes on the command line: group.key=value",
        )
    return from_tree(_override(tree, overrides)) if overrides else deployment


def _override(tree: DictConfig, overrides: Sequence[str]) -> DictConfig:
    def refuse(group: str) -> list[str]:
        keys = "scheduler.max_num_seqs=8 or another" if group == PRESET else f"{group}.KEY=VALUE"
        raise ConfigError("a lock file has chosen already", key=group, hint=f"set single keys: {keys}")

    for text in check_overrides(overrides, refuse, typed_tree()):
        override = parse_override(text)
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    return tree


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError("no such file", key="--lock", value=path, nearest=sibling(path))
    try:
        lock = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError("not YAML", key="--lock", value=path) from error
    if not isinstance(lock, DictConfig) or lock.get("lock") != _FORMAT or "deployment" not in lock:
        raise ConfigError("not a lock file", key="--lock", value=path, hint="treadle lock writes one")
    return lock
