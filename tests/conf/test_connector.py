from __future__ import annotations

from typing import Any

import pytest

from treadle.conf.connector import MOONCAKE_CLIENT_BYTES, MooncakeOptions, PeerOptions, read_connectors
from treadle.conf.errors import ConfigError
from treadle.conf.load import compose

DUMMY = ["model=llama3-8b", "model.weights=dummy"]


def test_options_become_typed() -> None:
    one, two = read_connectors(
        [{"name": "mooncake", "memory": "2GiB", "timeout_s": 1}, {"name": "peer", "peers": ["a:1", "[::1]:2"]}]
    )
    assert one.options == MooncakeOptions(memory="2GiB")
    assert (one.timeout_s, one.host_bytes) == (1.0, (2 << 30) + MOONCAKE_CLIENT_BYTES)
    assert two.options == PeerOptions(peers=("a:1", "[::1]:2"))
    assert (two.timeout_s, two.host_bytes) == (2.0, 0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "kv.connectors[0].name: has no name; there are mooncake, peer; others are entry points"),
        ({"name": "moncake"}, "kv.connectors[0].name=moncake: no such connector; did you mean mooncake?"),
        ({"name": "peer", "lissen": 1}, "kv.connectors[0].lissen=1: no such option; did you mean kv.connectors[0].li"),
        ({"name": "peer", "peers": ["a"]}, "kv.connectors[0].peers[0]=a: not HOST:PORT; for example 10.0.0.1:8100"),
        ({"name": "peer", "peers": "a:1"}, "kv.connectors[0].peers=a:1: wrong type; it takes a list of texts"),
        ({"name": "mooncake", "host": None}, "kv.connectors[0].host=null: wrong type; it takes a text"),
        ({"name": "mooncake", "memory": 3}, "kv.connectors[0].memory=3: wrong type; it takes a text"),
        ({"name": "mooncake", "memory": "3Ki"}, "kv.connectors[0].memory=3Ki: not a size; did you mean"),
        ({"name": "mooncake", "protocol": "ib"}, "kv.connectors[0].protocol=ib: not one of tcp, rdma"),
        ({"name": "peer", "timeout_s": 0}, "kv.connectors[0].timeout_s=0: not a number of seconds in (0, 600]"),
        ({"name": "peer", "timeout_s": True}, "kv.connectors[0].timeout_s=True: not a number of seconds"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_connectors([entry])
    assert str(refusal.value).startswith(message)


def test_a_connector_is_listed_once() -> None:
    with pytest.raises(ConfigError, match=r"kv\.connectors=peer: listed twice"):
        read_connectors([{"name": "peer"}, {"name": "peer"}])


def test_the_keys_of_tiers_compose_and_are_checked() -> None:
    kv = compose([*DUMMY, "kv.host_memory=20%", "kv.disk.path=/x", "kv.connectors=[{name:peer,listen:'a:1'}]"]).kv
    assert (kv.host_memory, kv.disk.path, kv.connectors) == ("20%", "/x", ({"name": "peer", "listen": "a:1"},))
    for override, message in [
        ("kv.host_memory=auto", "kv.host_memory=auto: not a size; did you mean kv.host_memory=2GiB or kv.host"),
        ("kv.disk.memory=auto", "kv.disk.memory=auto: not a size; did you mean kv.disk.memory=2GiB or kv.disk"),
        ("kv.disk.memory=0", "kv.disk.memory=0: holds nothing"),
        ("kv.disk.timeout_s=0", "kv.disk.timeout_s=0.0: below its least value"),
        ("kv.disk.pth=/x", "kv.disk.pth: no such key; did you mean kv.disk.path"),
        ("kv.connectors=[peer,{name:peer}]", "kv.connectors=['peer', {'name': 'peer'}]: wrong type; it takes a list"),
        ("kv.connectors=[a]", "kv.connectors=['a']: wrong type; it takes a list of mappings"),
        ("kv.connectors=[{name:moon}]", "kv.connectors[0].name=moon: no such connector"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError) as refusal:
            compose([*DUMMY, override])
        assert str(refusal.value).startswith(message)
