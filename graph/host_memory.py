"""Main memory for state that leaves the device: how much it is, where nothing is said, and its rows in the plan."""

from __future__ import annotations

from collections.abc import Sequence
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
LEAST_BYTES = 256 << 20
"""A smaller pool is not worth proposing."""
ENGINE_BYTES = 2 << 30
"""Main memory that the process of a GPU's engine takes beside the pool: an allowance."""
SERVER_BYTES = 256 << 20
"""Main memory for the process that answers over HTTP (104 MiB measured), and what others take meanwhile."""


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


def refuse_large_host(rows: Sequence[MemoryRow], left: int, problem: str) -> None:
    """Raise ConfigError if ``rows``, of the pool and of connectors, do not fit into what is left for them.

    ``problem`` says why there is no more. What is proposed is in ``left`` bytes.
    """
    needed = sum(row.nbytes for row in rows)
    if not rows or needed <= left:
        return
    pool, lent = rows[0].nbytes, needed - rows[0].nbytes
    if lent > max(left, 0):
        raise ConfigError(
            f"they take {format_bytes(lent)}: {problem}", key="kv.connectors", hint="give them a smaller memory"
        )
    fits = spell_bytes(left - lent) if left - lent >= LEAST_BYTES else "null"
    raise ConfigError(problem, key="kv.host_memory", value=format_bytes(pool), nearest=[f"kv.host_memory={fits}"])


def refuse_host_beside(rows: Sequence[MemoryRow]) -> None:
    """Raise ConfigError if this machine, which has a GPU, lacks the main memory for ``rows``."""
    left = machine.usable_bytes() - ENGINE_BYTES
    refuse_large_host(rows, left, f"this machine has {format_bytes(left)} for it beside the system and the engine")


def refuse_host_now(rows: Sequence[MemoryRow], beside: Sequence[MemoryRow]) -> None:
    """Raise ConfigError if main memory that is free now does not do for a plan's ``rows`` and those ``beside`` them.

    A pool is taken at the start, whole. For memory that is not there the system would end this process, or another one.
    """
    host = [*beside, *(row for row in rows if row.kind == "host")]
    others = [] if beside else [row for row in rows if row.kind != "host"]  # of a GPU's memory where a pool is beside
    model = sum(row.nbytes for row in others)
    start = ENGINE_BYTES if beside else sum(row.nbytes for row in others if row.kind != "state")
    free = machine.available_bytes() - SERVER_BYTES
    if sum(row.nbytes for row in host) + start > free:
        left = free - model if free - model >= LEAST_BYTES else free - start
        problem = (
            f"{format_bytes(free)} of main memory are free now, and the engine needs {format_bytes(start)} of them"
        )
        refuse_large_host(host, left, problem)


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
