"""Logits processors that are installed: their names. The runtime loads them when a request asks for one."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "treadle.logits_processors"


@cache
def installed_processors() -> dict[str, EntryPoint]:
    """Return the entry points of GROUP by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}
