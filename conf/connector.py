"""Connectors of ``kv.connectors``: which there are, and their options. Others add one by an entry point."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from treadle.conf.errors import ConfigError, nearest
from treadle.conf.size import parse_bytes

GROUP = "treadle.connectors"
"""entry points: callables that take the options of an entry of ``kv.connectors`` and return a Store"""
KEY = "kv.connectors"

MOONCAKE_CLIENT_BYTES = 128 << 20
"""What the process of a Mooncake client takes beside the memory that it lends (111 MB measured)."""

Address = Annotated[str, msgspec.Meta(pattern=r"^\S+:\d{1,5}$", description="HOST:PORT")]


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Mooncake store, which several engines fill and read."""

    master: Address | None = None
    """null: one of its own, for development; it ends with the engine"""
    memory: str = "1GiB"
    """main memory that this engine adds to the store"""
    host: str = "127.0.0.1"
    """this engine's address, as the others reach it"""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty: the store chooses"""


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other engines of the same model, each of which gives what its host memory and disk hold."""

    listen: Address | None = None
    """where others get what this engine holds; null: they do not"""
    peers: tuple[Address, ...] = ()
    secret_file: str | None = None
    """a file whose content all of them share; others are turned away"""


BUILT_IN: dict[str, type[MooncakeOptions] | type[PeerOptions]] = {"mooncake": MooncakeOptions, "peer": PeerOptions}


@dataclass(frozen=True, kw_only=True)
class Connector:
    """An entry of ``kv.connectors``."""

    name: str
    timeout_s: float
    """the most that one call may take; what takes longer is a miss"""
    options: MooncakeOptions | PeerOptions | Mapping[str, Any]
    """of a built-in one, its own type"""

    @property
    def host_bytes(self) -> int:
        """Main memory that it takes."""
        if isinstance(self.options, MooncakeOptions):
            return parse_bytes(self.options.memory) + MOONCAKE_CLIENT_BYTES
        return 0


@cache
def installed_connectors() -> dict[str, EntryPoint]:
    """Return the entry points of GROUP by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def read_connectors(entries: Sequence[Mapping[str, Any]]) -> tuple[Connector, ...]:
    """Return the connectors that a deployment lists. Raises ConfigError for one that is not installed, or an option
    that it does not have."""
    found = tuple(_read(index, dict(entry)) for index, entry in enumerate(entries))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("listed twice", key=KEY, value=name, hint="one entry holds all of a connector's options")
    return found


def _read(index: int, entry: dict[str, Any]) -> Connector:
    key = f"{KEY}[{index}]"
    name, timeout_s = entry.pop("name", None), entry.pop("timeout_s", 2.0)
    known = [*BUILT_IN, *installed_connectors()]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            "has no name" if name is None else "no such connector",
            key=f"{key}.name",
            value=name,
            nearest=() if name is None else nearest(str(name), known),
            hint=f"there are {', '.join(known)}; others are entry points of {GROUP}",
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 600:
        raise ConfigError(
            "not a number of seconds in (0, 600]",
            key=f"{key}.timeout_s",
            value=timeout_s,
            nearest=[f"{key}.timeout_s=2.0"],
        )
    kind = BUILT_IN.get(name)
    options = entry if kind is None else _convert(key, entry, kind)
    return Connector(name=name, timeout_s=float(timeout_s), options=options)


def _convert(
    key: str, entry: dict[str, Any], kind: type[MooncakeOptions] | type[PeerOptions]
) -> MooncakeOptions | PeerOptions:
    """Return the options of a built-in connector."""
    fields = kind.__struct_fields__
    for option, value in entry.items():
        if option not in fields:
            close = [f"{key}.{each}" for each in nearest(option, fields)]
            hint = f"there are timeout_s, {', '.join(fields)}"
            raise ConfigError("no such option", key=f"{key}.{option}", value=value, nearest=close, hint=hint)
    try:
        options = msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        raise _wrong_value(key, entry, kind, error) from None
    if isinstance(options, MooncakeOptions):
        try:
            parse_bytes(options.memory)
        except ValueError:
            raise ConfigError(
                "not a size", key=f"{key}.memory", value=options.memory, nearest=[f"{key}.memory=1GiB"]
            ) from None
    return options


def _wrong_value(
    key: str, entry: dict[str, Any], kind: type[MooncakeOptions] | type[PeerOptions], error: msgspec.ValidationError
) -> ConfigError:
    """Return the error for the option that ``error`` found a value of, which it does not take."""
    text, _, where = str(error).rstrip("`").partition(" - at `$")
    value: Any = entry
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", where):
        value = value[name] if name else value[int(index)]
    shown = "null" if value is None else value
    if text.startswith("Invalid enum"):
        choices = get_args(get_type_hints(kind)[where.removeprefix(".")])
        close = [f"{key}{where}={one}" for one in nearest(str(value), choices)]
        return ConfigError(f"not one of {', '.join(choices)}", key=key + where, value=shown, nearest=close)
    if "matching regex" in text and isinstance(value, str):
        return ConfigError("not HOST:PORT", key=key + where, value=shown, hint="for example 10.0.0.1:8100")
    takes = "a list of texts, [a,b]" if text.startswith("Expected `array`") else "a text"
    return ConfigError("wrong type", key=key + where, value=shown, hint=f"it takes {takes}")
