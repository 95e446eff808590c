"""Main memory for state that leaves the device: how much it is, where nothing is said, and its rows in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from treadle.conf.connector import read_connectors
from treadle.conf.errors import ConfigError
from treadle.conf.schema import KVConfig
from treadle.conf.size import format_bytes, parse_bytes, parse_share, spell_bytes
from treadle.graph import machine
from treadle.graph.footprint import MemoryRow
from treadle.graph.state import UNIT_BYTES, State

BUFFER_BYTES = 1 << 30
"""Host memory where a disk or connectors need some and nothing is said."""
LEAST_OBJECTS = 4
"""Half of host memory may be on its way, to the device and from it."""


def resolve_host(kv: KVConfig) -> KVConfig:
    """Return the group with host memory in bytes, null if nothing leaves the device."""
    if kv.disk.path is not None:
        kv = replace(kv, disk=replace(kv.disk, path=str(Path(kv.disk.path).expanduser().absolute())))
    if kv.host_memory is None:
        return replace(kv, host_memory=str(BUFFER_BYTES)) if kv.disk.path is not None or kv.connectors else kv
    share = parse_share(kv.host_memory)
    size = parse_bytes(kv.host_memory) if share is None else int(machine.memory_bytes() * share)
    return replace(kv, host_memory=str(size))


def host_rows(kv: KVConfig) -> tuple[MemoryRow, ...]:
    """Return the rows of a resolved group: the pool, and what connectors take."""
    rows = []
    if kv.host_memory is not None:
        rows.append(MemoryRow("host", "state that left the device", int(kv.host_memory)))
    for connector in read_connectors(kv.connectors):
        if connector.host_bytes:
            rows.append(MemoryRow("host", f"{connector.name}: what it lends, and its process", connector.host_bytes))
    return tuple(rows)


def refuse_small_host(kv: KVConfig, state: State) -> None:
    """Raise ConfigError if host memory does not hold a few objects of ``state``."""
    if kv.host_memory is None:
        return
    largest = state.scratch_bytes
    # A seal of a unit stands before each.
    least = LEAST_OBJECTS * (largest + UNIT_BYTES)
    if int(kv.host_memory) < least:
        raise ConfigError(
            f"a page or block of this model takes {format_bytes(largest)}, and a few must fit",
            key="kv.host_memory",
            value=format_bytes(int(kv.host_memory)),
            nearest=[f"kv.host_memory={spell_bytes(least, up=True)}", "kv.host_memory=null"],
        )
