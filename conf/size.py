"""Byte sizes as people write them: 2GiB, 512 MiB, 1.5GB, 4096."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Return the bytes that ``text`` names: a plain number, or one with k, M, G, T (1024), KiB.. (1024), KB.. (1000).

    Raises ValueError on anything else.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 2GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_share(text: str) -> float | None:
    """Return the share that a percentage names, 0.9 for ``90%``; None if ``text`` is none of (0, 100]."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / 100 if match else 0.0
    return share if 0 < share <= 1 else None


def spell_bytes(count: int, *, up: bool = False) -> str:
    """Return about ``count`` bytes as configuration takes them, ``13.25GiB``: never more, with ``up`` never less."""
    for suffix, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            hundredths = -(-count * 100 // unit) if up else count * 100 // unit
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + suffix
    return str(count)


def format_bytes(count: int, *, up: bool = False) -> str:
    """Return ``count`` bytes in the largest binary unit that leaves at least 1, for people to read: ``1.50 GiB``.

    With ``up``, for what is needed, it is never less than ``count``.
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    if up:
        value = math.ceil(value * 100) / 100
    return f"{count} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def body_bytes(max_len: int) -> int:
    """Return how large a request's body may be where nothing is said.

    Room for a whole context of ``max_len`` tokens in ids or escaped text, and for much beside it. Reading JSON holds up
    everybody's stream and cannot be interrupted, so this is no larger than it has to be.
    """
    return (1 << 20) + 16 * max_len
