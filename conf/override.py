"""Overrides as Hydra reads them (``group=choice``, ``group.key=value``), checked before anything is composed."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from treadle.conf.connector import BUILT_IN, installed_connectors
from treadle.conf.connector import KEY as CONNECTORS
from treadle.conf.errors import ConfigError, nearest
from treadle.conf.schema import GROUPS

PRESET = "preset"
OPTIONAL = (PRESET, "bench")
"""groups of which no choice is made unless somebody asks"""
_FREE = "*"
_BRACKETS = {"[": "]", "{": "}", "(": ")"}


def schema_keys() -> dict[str, Any]:
    """Return dotted key -> type of everything that a deployment holds; ``group.key.*`` stands for a free mapping."""
    keys: dict[str, Any] = {}

    def visit(prefix: str, schema: type) -> None:
        hints = get_type_hints(schema)
        for spec in fields(schema):
            key, hint = f"{prefix}.{spec.name}", hints[spec.name]
            inner = next((t for t in _alternatives(hint) if is_dataclass(t)), None)
            keys[key] = hint
            if isinstance(inner, type):
                visit(key, inner)
            elif get_origin(hint) is dict:
                keys[f"{key}.{_FREE}"] = Any

    for group, schema in GROUPS.items():
        visit(group, schema)
    return keys


def describe(hint: Any) -> str:
    """Return a type as a user reads it: ``an integer or null``."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    texts = []
    for one in _alternatives(hint):
        origin = get_origin(one)
        plural = "mappings, [{a: 1}]" if origin is tuple and get_origin(get_args(one)[0]) is dict else "texts, [a,b]"
        texts.append(f"a list of {plural}" if origin is tuple else names.get(one, "a mapping, {a: 1}"))
    return " or ".join(texts)


def check_overrides(
    overrides: Sequence[str], options: Callable[[str], list[str]], schema: Any, *, sweep: bool = False
) -> list[str]:
    """Return ``overrides`` ready for Hydra. Raises ConfigError on the first key, choice or type that is not valid.

    ``options`` gives the choices of a group; ``schema`` is the typed tree that values are tried on. ``null`` may be
    spelled ``auto`` wherever null means that, and keys inside a free mapping need no ``+``. With ``sweep`` a value may
    be a list of values, as in ``-m``.
    """
    keys = schema_keys()
    ready = []
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra":
            ready.append(text)
            continue
        if override.is_sweep_override() and not sweep:
            raise ConfigError("several values for one key", key=key, hint="sweep over them with -m, or quote the text")
        values: list[Any]
        if override.is_sweep_override():
            values = list(override.sweep_iterator()) if override.is_discrete_sweep() else []
        else:
            values = [override.value()]
        if key in OPTIONAL and None in values:
            if len(values) > 1:
                raise ConfigError("null is not one of several values", key=key, hint=f"leave {key} out for none")
            # Hydra knows null in a defaults list only, where it stands for these already: it undoes what came before.
            ready = [one for one in ready if not one.startswith(f"{key}=")]
        elif key in GROUPS or key == PRESET:
            if override.is_delete() and key not in OPTIONAL:
                hint = f"choose another: {', '.join(f'{key}={name}' for name in options(key))}"
                raise ConfigError("a deployment needs one of this group", key=f"~{key}", hint=hint)
            for value in values:
                _check_choice(key, value, options(key))
            ready.append(text)
        else:
            ready.append(_check_key(text, override, values, keys, schema))
    return ready


def _is_free(key: str) -> bool:
    """Whether ``key`` is a free mapping of the schema, or inside of one."""
    return any(name.endswith(_FREE) and f"{key}.".startswith(name[:-1]) for name in schema_keys())


def _empty_mapping(key: str) -> ConfigError:
    """Return the error for a free mapping that is to be emptied as a whole, which composing cannot do."""
    hint = f"mappings are merged; '~{key}.NAME' leaves one out"
    if key == "model.sampling":
        hint += ", model.generation_config=none what the checkpoint recommends"
    return ConfigError("leaves all that is there as it is", key=key, value="{}", hint=hint)


def unknown_key(key: str) -> ConfigError:
    """Return the error for a key that no group has, with the nearest that one has."""
    keys = [name for name in schema_keys() if not name.endswith(_FREE)]
    group, _, leaf = key.partition(".")
    here = [name.partition(".")[2] for name in keys if name.startswith(f"{group}.")]
    if here:
        close = [f"{group}.{name}" for name in nearest(leaf, here)]
        elsewhere = [name for name in keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = "" if close or elsewhere else f"{group} has {', '.join(here)}"
        return ConfigError("no such key", key=key, nearest=close or elsewhere[:3], hint=hint)
    words = {name.rpartition(".")[2]: name for name in reversed(keys)} | {name: name for name in [*GROUPS, PRESET]}
    full = nearest(key, keys)
    close = list(full) if leaf and full else [words[word] for word in nearest(key.rpartition(".")[2], words)]
    hint = "" if close else f"the groups are {', '.join([*GROUPS, PRESET])}"
    return ConfigError("no such key", key=key, nearest=close, hint=hint)


def unknown_choice(group: str, value: object, choices: Sequence[str]) -> ConfigError:
    """Return the error for a group that has no file of that name."""
    names = [name for name in choices if not name.startswith("_")]
    if group == "model" and ("/" in str(value) or str(value).endswith(".gguf")):
        return ConfigError("no such choice", key=group, value=value, nearest=[f"model=hf model.path={value}"])
    close = [f"{group}={name}" for name in nearest(str(value), names)]
    hint = f"{group} has {', '.join(names)}"
    if group == "model":
        hint += "; a directory or .gguf file of yours: model=hf model.path=PATH"
    return ConfigError("no such choice", key=group, value=value, nearest=close, hint=hint)


def wrong_type(key: str, value: object = None) -> ConfigError:
    """Return the error for a value that is not of its key's type; None: it is not known."""
    hint = schema_keys().get(key)
    takes = f"it takes {describe(hint)}" if hint is not None else ""
    close = []
    if key == CONNECTORS:
        names = value if isinstance(value, list) else [value]
        installed = [*BUILT_IN, *installed_connectors()]
        known = bool(names) and all(name in installed for name in names)
        close = [f"'{key}=[{', '.join(f'{{name: {name}}}' for name in names)}]'"] if known else []
    return ConfigError("wrong type", key=key, value=value, nearest=close, hint=takes)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def parse_override(text: str) -> Override:
    """Return what Hydra reads in ``text``. Raises ConfigError."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(
                f"{text!r} is not group=choice or group.key=value",
                nearest=nearest(text, GROUPS),
                hint="see treadle --help",
            ) from None
        key, _, value = text.partition("=")
        name = key.lstrip("+~")
        if name not in (*GROUPS, *OPTIONAL, *schema_keys()) and not _is_free(name) and not name.startswith("hydra."):
            raise unknown_key(name) from None
        closed = value + _closing(value)
        if closed != value and _is_readable(f"{key}={closed}"):
            problem = f"lacks {closed.removeprefix(value)} at its end"
            raise ConfigError(problem, key=key, value=value, nearest=[f"'{key}={closed}'"]) from None
        hint = f"quote it for the shell and for YAML: '{key}=\"{value}\"'"
        raise ConfigError("cannot read the value", key=key, value=value, hint=hint) from None


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True


def _closing(value: str) -> str:
    """Return the brackets and the quote that are open at the end of ``value``."""
    closing, quote = "", ""
    for char in value:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _BRACKETS:
            closing = _BRACKETS[char] + closing
        elif closing.startswith(char):
            closing = closing[1:]
    return quote + closing


def _check_choice(group: str, value: Any, choices: Sequence[str]) -> None:
    if isinstance(value, list):  # Hydra: several files of one group, merged in order
        for one in value:
            _check_choice(group, one, choices)
    elif value is None or str(value) not in choices:
        raise unknown_choice(group, "null" if value is None else value, choices)


def _check_key(text: str, override: Override, values: list[Any], keys: dict[str, Any], schema: Any) -> str:
    """Return ``text`` as Hydra needs it, after trying each value on the typed tree."""
    key = override.key_or_group
    plain, free = text.lstrip("+"), _is_free(key)
    if not free and key not in keys:
        raise unknown_key(key)
    if f"{key}.{_FREE}" in keys and (override.is_delete() or any(value in ({}, None) for value in values)):
        raise _empty_mapping(key)
    if override.is_delete():
        if free:
            return text
        raise ConfigError("a key of the schema cannot be deleted", key=f"~{key}", hint=f"set it: {key}=...")
    for value in values if key in keys else ():
        hint = keys[key]
        if values == ["auto"] and type(None) in _alternatives(hint) and str not in _alternatives(hint):
            return f"{key}=null"
        try:
            OmegaConf.update(schema.copy(), key, value, merge=True)
        except OmegaConfBaseException:
            raise wrong_type(key, "null" if value is None else value) from None
    return f"++{plain}" if free else plain
