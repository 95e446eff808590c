from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers_engine import DictStore, num_objects, page, until

from treadle.conf import connector
from treadle.conf.connector import read_connectors
from treadle.conf.errors import ConfigError
from treadle.conf.schema import DiskConfig, KVConfig
from treadle.graph.state import LayerKV, PagedKV, State
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.tiers import build
from treadle.runtime.state.tiers.build import make_store, open_tiers
from treadle.runtime.state.tiers.peer import PeerStore
from treadle.runtime.state.tiers.tiers import Tiers

# A page of 1024 bytes.
KV = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=8, v_dim=8),), dtype="float32", page_tokens=16)
STATE = State(groups=(KV,))


def opened(kv: KVConfig) -> Tiers | None:
    backend = CpuBackend(threads=1)
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    return open_tiers(kv, backend, arena, backend.stream(overlap=False), state=STATE, model="m")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Pretend that a package brings a connector."""

    def add(name: str, factory: Any) -> None:
        class Point(EntryPoint):
            def load(self) -> Any:
                return factory

        points = {name: Point(name=name, value="a:b", group=connector.GROUP)}
        monkeypatch.setattr(connector, "installed_connectors", lambda: points)
        monkeypatch.setattr(build, "installed_connectors", lambda: points)

    return add


def test_nothing_leaves_the_device_unless_it_is_asked_for() -> None:
    assert opened(KVConfig()) is None


def test_the_disk_is_asked_before_connectors_in_their_order(
    tmp_path: Path, install: Callable[[str, Any], None]
) -> None:
    stores = []

    def factory(**options: object) -> DictStore:
        assert options == {"size": 3}
        stores.append(DictStore())
        return stores[0]

    install("mine", factory)
    connectors = ({"name": "peer"}, {"name": "mine", "size": 3, "timeout_s": 5})
    disk = DiskConfig(path=str(tmp_path), memory="1MiB")
    tiers = opened(KVConfig(host_memory=str(1 << 16), disk=disk, connectors=connectors))
    assert tiers is not None
    assert [(link.name, link.limit_s) for link in tiers._links.values()] == [("disk", 10), ("peer", 2), ("mine", 5)]
    ticket = tiers.sink([page(1)])
    until(lambda: ticket.done and len(stores[0].kept) == 1, tiers)
    until(lambda: num_objects(tiers) == 1, tiers)
    tiers.close()
    assert stores[0].closed


def test_a_connector_that_cannot_be_made_says_why(install: Callable[[str, Any], None]) -> None:
    install("mine", DictStore)
    with pytest.raises(ConfigError, match=r"kv\.connectors=mine: the connector refuses its options: TypeError.*colour"):
        make_store(read_connectors([{"name": "mine", "colour": 3}])[0])
    assert isinstance(make_store(read_connectors([{"name": "peer"}])[0]), PeerStore)
