"""Plain YAML values to the structs of ``graph.spec``: nulls become defaults, mistakes name the path and what works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from treadle.conf.errors import nearest
from treadle.graph.spec import SpecError

T = TypeVar("T")


def decode(kind: type[T], data: Any, where: str, raw: Mapping[str, Any]) -> T:
    """Return ``data`` as ``kind``. ``where`` is its path in the description ``raw``, whose text errors quote.

    Raises: SpecError.
    """
    try:
        return msgspec.convert(_without_nulls(data), kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, data, where, raw) from None


def decode_optional(kind: type[T], data: Any, where: str, raw: Mapping[str, Any]) -> T | None:
    """Return None for a null section, else what ``decode`` returns."""
    return None if data is None else decode(kind, data, where, raw)


def _without_nulls(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    if isinstance(data, (list, tuple)):
        return [_without_nulls(value) for value in data]
    return data


def _explain(message: str, kind: Any, data: Any, where: str, raw: Mapping[str, Any]) -> SpecError:
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`")
    key, steps = where + path, [step for step in re.split(r"[.\[\]]+", path) if step]
    name = re.search(r"`([^`]*)`", text)
    if name and text.startswith("Object contains unknown field"):
        fields = _field_names(kind, steps, data)
        return SpecError(
            "unknown field",
            key=f"{key}.{name[1]}",
            nearest=nearest(name[1], fields, 2),
            hint=f"known: {', '.join(fields)}",
        )
    if name and text.startswith("Object missing required field"):
        missing = _raw_at(raw, f"{key}.{name[1]}")
        hint = f"it stands for {missing}, which config.json does not give" if isinstance(missing, str) else ""
        return SpecError("a value is required", key=f"{key}.{name[1]}", hint=hint)
    value = _value_at(data, steps)
    if isinstance(value, (dict, list)):
        value = None
    source = _raw_at(raw, key)
    stands = f"it stands for {source}" if isinstance(source, str) and source.startswith("${") else ""
    choices = _choices(kind, steps, data)
    problem = text[0].lower() + text[1:]
    if choices:
        return SpecError(
            "not one of the choices",
            key=key,
            value=value,
            nearest=nearest(str(value), choices),
            hint="; ".join(filter(None, [f"choices: {', '.join(choices)}", stands])),
        )
    return SpecError(problem, key=key, value=value, hint=stands)


def _value_at(data: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(data, Mapping):
            data = data.get(step)
        elif isinstance(data, (list, tuple)) and step.isdigit() and int(step) < len(data):
            data = data[int(step)]
        else:
            return None
    return data


def _raw_at(raw: Mapping[str, Any], key: str) -> Any:
    """Return what stands at a path of the description, or at the places that it refers to on the way."""
    steps = [step for step in re.split(r"[.\[\]]+", key) if step]
    for _ in range(9):
        for done in range(len(steps) + 1):
            value = _value_at(raw, steps[:done])
            if isinstance(value, str) and (target := _referred(value, raw)):
                steps = [*target, *steps[done:]]
                break
        else:
            return value
    return None


def _referred(value: str, raw: Mapping[str, Any]) -> list[str]:
    """Return the path that ``${a.b}``, or the name of a rope table, stands for; empty for other text."""
    if match := re.fullmatch(r"\$\{([\w.]+)\}", value):
        return match[1].split(".")
    return ["rope", value] if value in (raw.get("rope") or {}) else []


def _types_at(kind: Any, steps: list[str], data: Any) -> list[inspect.Type]:
    """Return what may stand at a path below ``kind``; a tagged union is narrowed by the data's own tag."""
    found = [inspect.type_info(kind)]
    for step in [*steps, None]:
        found = [inner for item in found for inner in (item.types if isinstance(item, inspect.UnionType) else [item])]
        structs = [item for item in found if isinstance(item, inspect.StructType)]
        tagged = [
            item
            for item in structs
            if item.tag_field and isinstance(data, dict) and data.get(item.tag_field) == item.tag
        ]
        if tagged:
            found = list(tagged)
        if step is None:
            break
        found = [inner for item in found for inner in _below(item, step)]
        data = _value_at(data, [step])
    return found


def _below(kind: inspect.Type, step: str) -> list[inspect.Type]:
    match kind:
        case inspect.StructType(fields=fields):
            return [field.type for field in fields if field.encode_name == step]
        case inspect.VarTupleType(item_type=item) | inspect.DictType(value_type=item):
            return [item]
        case _:
            return []


def _field_names(kind: Any, steps: list[str], data: Any) -> list[str]:
    structs = [item for item in _types_at(kind, steps, data) if isinstance(item, inspect.StructType)]
    return sorted({field.encode_name for item in structs for field in item.fields})


def _choices(kind: Any, steps: list[str], data: Any) -> list[str]:
    """Return the names that may stand at a path: of a literal, or the tags of a union when the tag itself is wrong."""
    for item in _types_at(kind, steps, data):
        if isinstance(item, inspect.LiteralType):
            return [str(value) for value in item.values]
    if steps:
        structs = [item for item in _types_at(kind, steps[:-1], None) if isinstance(item, inspect.StructType)]
        return [str(item.tag) for item in structs if item.tag_field == steps[-1]]
    return []
