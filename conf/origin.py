"""Which preset or other choice set the key that a mistake is about, where the user did not write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from yaml import YAMLError

from treadle.conf.errors import ConfigError
from treadle.conf.override import PRESET
from treadle.conf.schema import GROUPS


def blame_preset(error: ConfigError, overrides: Sequence[str], config_dir: str | Path | None = None) -> ConfigError:
    """Return ``error``, saying that a choice of ``overrides`` set its key if that did and not they themselves."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    preset, key = given.get(PRESET), error.key
    if key is None or key in given or (group := key.partition(".")[0]) not in GROUPS:
        return error
    if group in given:
        value = _read(group, given[group], config_dir).get(key.partition(".")[2])
        if isinstance(value, str | int | float) and value != MISSING:
            return error.saying(f"{group}={given[group]} sets {_said(key, value)}")
    if preset is None:
        return error
    keys = _read(PRESET, preset, config_dir)
    defaults = [each for each in keys.pop("defaults", ()) if isinstance(each, Mapping)]
    choices = {name.removeprefix("override /"): choice for each in defaults for name, choice in each.items()}
    value = OmegaConf.select(OmegaConf.create(keys), key)
    if value is not None:
        said = _said(key, value)
    elif group in choices and group not in given and key.partition(".")[2] in _read(group, choices[group], config_dir):
        said = f"{group}={choices[group]}"
    else:
        return error
    return error.saying(f"preset={preset} sets {said}, and what the command line sets wins")


def _said(key: str, value: object) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _read(group: str, choice: str, config_dir: str | Path | None) -> dict[str, Any]:
    """Return what the file of a choice holds, ours or else the user's; nothing if there is none."""
    places: list[Traversable] = [resources.files("treadle.conf")]
    if config_dir is not None:
        places.append(Path(config_dir))
    for place in places:
        file = place / group / f"{choice}.yaml"
        if file.is_file():
            try:
                with file.open(encoding="utf-8") as text:
                    found = OmegaConf.to_container(OmegaConf.load(text))
            except (YAMLError, OSError, UnicodeDecodeError):  # which is what ``error`` is about
                return {}
            return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    return {}
