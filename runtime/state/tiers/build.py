"""The tiers that a deployment asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.conf.connector import KEY, Connector, MooncakeOptions, PeerOptions, installed_connectors, read_connectors
from treadle.conf.errors import ConfigError
from treadle.conf.size import parse_bytes
from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link, Tiers

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.conf.schema import KVConfig
    from treadle.graph.state import State
    from treadle.kernels.backend.protocol import Backend, Stream
    from treadle.runtime.state.tiers.store import Store

DISK_READERS = 4
"""Threads that read files: hashing is what takes them longest."""


def open_tiers(
    kv: KVConfig, backend: Backend, arena: Tensor, stream: Stream, *, state: State, model: str
) -> Tiers | None:
    """Return the tiers of a resolved group, None if nothing leaves the device.

    ``arena`` [bytes] uint8, computed on ``stream``, holds pages and blocks of ``state``. ``model`` names all that
    values depend on beside the tokens: the checkpoint's content, and how weights are quantized.

    Raises: ConfigError for a folder or a connector that cannot be used; one that is only down now is tried again.
    """
    if kv.host_memory is None:
        return None
    links = []
    for connector in read_connectors(kv.connectors):
        store, limit_s = make_store(connector), connector.timeout_s
        links.append(Link(name=connector.name, store=store, where=Where.CONNECTOR, limit_s=limit_s))
    if kv.disk.path is not None:
        disk = DiskStore(Path(kv.disk.path).expanduser(), parse_bytes(kv.disk.memory))
        link = Link(name="disk", store=disk, where=Where.DISK, limit_s=kv.disk.timeout_s, readers=DISK_READERS)
        links.insert(0, link)
    sizes = [group.page_bytes for group in state.groups]
    if state.block is not None:
        sizes.append(state.block.block_bytes)
    return Tiers(
        backend,
        arena,
        stream,
        host_bytes=int(kv.host_memory),
        sizes=sizes,
        model=model,
        # Kinds, shapes, dtypes and order of all that a page or block holds; the number changes with their arrangement.
        layout=f"2 {state!r}",
        links=links,
    )


def make_store(connector: Connector) -> Store:
    """Return a connector's store, not yet opened. Raises ConfigError if what it needs is not installed."""
    match connector.options:
        case MooncakeOptions() as options:
            from treadle.runtime.state.tiers.mooncake import MooncakeStore

            return MooncakeStore(options)
        case PeerOptions() as options:
            from treadle.runtime.state.tiers.peer import PeerStore

            return PeerStore(options, limit_s=connector.timeout_s)
        case options:
            try:
                return installed_connectors()[connector.name].load()(**options)  # type: ignore[no-any-return]
            # Foreign code: whatever it raises is about these options, or its installation.
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"the connector refuses its options: {type(error).__name__}: {error}", key=KEY, value=connector.name
                ) from error
