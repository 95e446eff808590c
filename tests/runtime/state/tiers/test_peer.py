from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers_engine import SIZE, Engine, engine, key, located, num_objects, page, until

from treadle.conf.connector import PeerOptions
from treadle.conf.errors import ConfigError
from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.peer import PeerStore
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link
from treadle.runtime.state.tiers.wire import Wire


def peer(limit_s: float = 20.0, **options: object) -> tuple[Link, PeerStore]:
    store = PeerStore(PeerOptions(**options), limit_s=limit_s)  # type: ignore[arg-type]
    return Link(name="peer", store=store, where=Where.CONNECTOR, limit_s=limit_s), store


@contextmanager
def offering(*numbers: int, model: str = "m", **options: object) -> Iterator[tuple[Engine, str]]:
    """An engine that gives pages to others; its address."""
    link, store = peer(listen="127.0.0.1:0", **options)
    with engine(link, model=model) as e:
        e.sink(*numbers)
        until(lambda: store.server is not None, e.tiers)
        assert store.server is not None
        yield e, f"127.0.0.1:{store.server.port}"


def test_one_engine_pulls_what_another_holds() -> None:
    with offering(1, 2, 3) as (source, address):
        with engine(peer(peers=(address,))[0]) as e:
            assert located(e, 1, 3, 4) == [Where.CONNECTOR, Where.CONNECTOR, None]
            e.arena[: 8 * SIZE] = 99
            assert e.fetch(3, 1, 4, 2) == [True, True, False, True]
            assert e.find(1, 2, 3) == [Where.HOST] * 3
            assert e.tiers.stats().stores["peer"].calls["save"].calls == 0
        assert source.tiers.stats().used_bytes == 3 * (SIZE + 256)


@contextmanager
def offering_from_disk(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine with page 1 on its disk alone, and one that asks it."""
    link, store = peer(listen="127.0.0.1:0")
    disk = Link(name="disk", store=DiskStore(folder, 1 << 20), where=Where.DISK, limit_s=20.0)
    with engine(disk, link) as source:
        source.sink(1)
        until(lambda: num_objects(source.tiers) == 1, source.tiers)
        source.tiers._pool.drop(key(1))
        until(lambda: store.server is not None, source.tiers)
        assert store.server is not None
        with engine(peer(peers=(f"127.0.0.1:{store.server.port}",))[0]) as e:
            yield source, e


def test_what_is_on_the_other_engines_disk_is_given_too(tmp_path: Path) -> None:
    with offering_from_disk(tmp_path) as (_, e):
        assert located(e, 1) == [Where.CONNECTOR]
        assert e.fetch(1) == [True]


def test_what_is_damaged_on_the_other_engines_disk_is_forgotten_there(tmp_path: Path) -> None:
    with offering_from_disk(tmp_path) as (source, e):
        (file,) = (each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > SIZE)
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        assert located(e, 1) == [Where.CONNECTOR]
        assert e.fetch(1) == [False]
        # It was not sent at all.
        assert e.tiers.stats().stores["peer"].calls["load"].corrupt == 0
        assert num_objects(source.tiers) == 0
        assert not file.exists()


def test_peers_are_asked_in_turn_and_a_dead_one_costs_nothing_but_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = f"127.0.0.1:{listening.getsockname()[1]}"
    with offering(1) as (_, one), offering(1, 2) as (_, two), engine(peer(peers=(dead, one, two))[0]) as e:
        assert located(e, 1, 2, 3) == [Where.CONNECTOR, Where.CONNECTOR, None]
        assert e.fetch(1, 2) == [True, True]
        assert e.tiers.stats().stores["peer"].calls["lookup"].errors == 0


@pytest.mark.parametrize("what", ["model", "secret"])
def test_engines_of_another_model_or_secret_turn_each_other_away(what: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "b").write_text("another\n")
    secret = {"secret_file": str(tmp_path / "a")} if what == "secret" else {}
    with offering(1, **secret) as (_, address):
        if what == "secret":
            with engine(peer(peers=(address,), **secret)[0]) as e:
                assert e.fetch(1) == [True]
            secret = {"secret_file": str(tmp_path / "b")}
        with engine(peer(peers=(address,), **secret)[0], model="m" if what == "secret" else "x") as e:
            assert located(e, 1) == [None]
            assert e.fetch(1) == [False]
            assert "no peer answers" in e.tiers.stats().stores["peer"].last_error


def test_an_address_that_cannot_be_listened_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"kv\.connectors=listen: {address}: cannot listen there: .*in use"):
            peer(listen=address)
    for wrong in "127.0.0.1:99999", "192.0.2.1:0":
        with pytest.raises(ConfigError, match="cannot listen there"):
            peer(listen=wrong)


def test_a_secret_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, problem in ("missing", "cannot be read"), ("empty", "empty"):
        with pytest.raises(ConfigError, match=problem):
            peer(secret_file=str(tmp_path / name))


@pytest.mark.parametrize("behaviour", ["silent", "garbage", "ends"])
def test_a_strange_listener_costs_its_limit(behaviour: str) -> None:
    answers = {"silent": None, "garbage": b"\xff" * 64, "ends": b""}
    gate = threading.Event()

    def listen(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                if (answer := answers[behaviour]) is None:
                    gate.wait()
                else:
                    connection.sendall(answer)

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=listen, args=(server,), daemon=True)
    thread.start()
    address = f"127.0.0.1:{server.getsockname()[1]}"
    with engine(peer(limit_s=0.2, peers=(address,))[0]) as e:
        assert located(e, 1) == [None]
        assert e.fetch(1) == [False]
        assert e.sink(1) == [True]
    gate.set()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5.0)


def test_clients_that_talk_nonsense_are_turned_away_and_others_served() -> None:
    with offering(1) as (_, address):
        host, _, port = address.partition(":")
        for data in b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00abcd", b"":
            with socket.create_connection((host, int(port)), 5.0) as client:
                client.sendall(data)
        with engine(peer(peers=(address,))[0]) as e:
            assert e.fetch(1) == [True]


SERVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from test_peer import offering
with offering(1, 2) as (e, address):
    print(address, flush=True)
    sys.stdin.read()
"""


def test_two_processes_and_one_is_killed() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-P", "-c", SERVER, str(here), str(here.parents[2])]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        address = other.stdout.readline().strip()
        with engine(peer(peers=(address,))[0]) as e:
            assert located(e, 1, 2) == [Where.CONNECTOR] * 2
            assert e.fetch(1) == [True]
            other.kill()
            other.wait()
            # What it was last heard to hold is gone with it: a miss, not a wait.
            assert e.fetch(2) == [False]
            assert e.finish(e.tiers.fetch([page(1, 50)])) == [True]
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


def test_a_peer_that_ends_in_the_middle_of_an_object_or_sends_garbage_costs_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Wire.send_bytes
    sent: list[int] = []

    def half(wire: Wire, data: memoryview | None) -> None:
        sent.append(1)
        if len(sent) == 1 or data is None:
            whole(wire, data)
        elif len(sent) == 2:
            wire._send(memoryview(len(data).to_bytes(8, "little")))
            wire._send(data[: len(data) // 2])
            wire.close()
        else:
            whole(wire, memoryview(bytes(len(data))))

    monkeypatch.setattr(Wire, "send_bytes", half)
    with offering(1, 2, 3, 4) as (_, address), engine(peer(peers=(address,))[0], host=128) as e:
        # The first arrives whole, the second in part and the third not at all.
        assert e.fetch(1, 2, 3) == [True, False, False]
        assert e.fetch(4) == [False]
        assert e.tiers.stats().stores["peer"].calls["load"].corrupt == 1
        assert e.tiers.stats().used_bytes == SIZE + 256
