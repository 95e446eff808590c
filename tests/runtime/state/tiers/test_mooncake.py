from __future__ import annotations

import ctypes.util
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers_engine import SIZE, Engine, engine, key, located, until

from treadle.conf.connector import MooncakeOptions
from treadle.conf.errors import ConfigError
from treadle.runtime.state.tiers import mooncake
from treadle.runtime.state.tiers.mooncake import MooncakeStore, master_program
from treadle.runtime.state.tiers.mooncake_master import MooncakeMaster
from treadle.runtime.state.tiers.store import StoreError
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link

pytestmark = pytest.mark.usefixtures("hasty")
PACKAGE = importlib.util.find_spec("mooncake")
LIBRARY = ctypes.util.find_library("ibverbs")
# Where CI runs, the library has to be there.
needs_mooncake = pytest.mark.skipif(
    PACKAGE is None or LIBRARY is None,
    reason="needs mooncake-transfer-engine-non-cuda, and libibverbs1",
)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a store takes the client seconds; here it may go on behind the test."""
    monkeypatch.setattr(Engine, "close_s", 0.1)


def shared(master: str | None, limit_s: float = 20.0) -> tuple[Link, MooncakeStore]:
    store = MooncakeStore(MooncakeOptions(master=master, memory="16MiB"))
    return Link(name="mooncake", store=store, where=Where.CONNECTOR, limit_s=limit_s), store


@contextmanager
def master() -> Iterator[MooncakeMaster]:
    made = MooncakeMaster(master_program())
    try:
        yield made
    finally:
        made.close()


def child_of(shell: int) -> int:
    """The process of a master, by the shell that ends it."""
    return int(Path(f"/proc/{shell}/task/{shell}/children").read_text())


@needs_mooncake
def test_engines_share_what_sinks_and_start_a_master_where_none_is_given() -> None:
    link, store = shared(None)
    with engine(link) as first:
        first.sink(1, 2)
        until(lambda: first.tiers.stats().stores["mooncake"].calls["save"].done == 2, first.tiers)
        assert store.master is not None
        with engine(shared(store.master.address)[0]) as second:
            assert located(second, 1, 2, 3) == [Where.CONNECTOR, Where.CONNECTOR, None]
            second.arena[: 8 * SIZE] = 99
            assert second.fetch(2, 1, 3) == [True, True, False]
        with engine(shared(store.master.address)[0], model="another") as third:
            assert located(third, 1) == [None]


@needs_mooncake
def test_a_master_that_hangs_and_dies_costs_misses_until_it_is_back() -> None:
    with master() as service:
        link, _ = shared(service.address, limit_s=2.0)
        with engine(link) as e:
            e.sink(1, 2)
            until(lambda: e.tiers.stats().stores["mooncake"].calls["save"].done == 2, e.tiers)
            for n in (1, 2):
                e.tiers._pool.drop(key(n))
            os.kill(child_of(service._process.pid), signal.SIGSTOP)
            # The answer would come after half a minute; the load costs its limit.
            assert e.fetch(1) == [False]
            assert e.tiers.stats().stores["mooncake"].calls["load"].timeouts == 1
            os.kill(child_of(service._process.pid), signal.SIGKILL)
            assert e.sink(3, 4) == [True, True]
            assert e.fetch(3) == [True]
            assert e.fetch(2) == [False]
            again = MooncakeMaster(master_program(), port=int(service.address.rpartition(":")[2]))
            try:
                for n in range(5, 30):
                    e.sink(n)
                    until(lambda: e.tiers._lanes["mooncake"].waiting == 0, e.tiers, 60)
                    if e.tiers.stats().stores["mooncake"].calls["save"].done > 2:
                        break
                    time.sleep(0.2)
                else:
                    pytest.fail("the store is not used again")
                e.tiers._pool.drop(key(n))
                assert e.fetch(n) == [True]
            finally:
                e.close()
                again.close()


@needs_mooncake
def test_a_master_that_hangs_while_the_client_connects_holds_nobody_up() -> None:
    with master() as service:
        os.kill(child_of(service._process.pid), signal.SIGSTOP)
        with engine(shared(service.address, limit_s=0.5)[0]) as e:
            assert located(e, 1) == [None]
            assert e.sink(1) == [True]
            assert e.fetch(1, 2) == [True, False]
            assert not e.tiers.stats().stores["mooncake"].is_open


@needs_mooncake
def test_a_client_that_is_killed_is_started_again() -> None:
    with master() as service:
        link, store = shared(service.address)
        with engine(link) as e:
            e.sink(1, 2)
            until(lambda: e.tiers.stats().stores["mooncake"].calls["save"].done == 2, e.tiers)
            assert store._client is not None
            store._client._process.kill()
            for n in (1, 2):
                e.tiers._pool.drop(key(n))
            # What was in the memory that it lent is gone with it, and the call that finds out fails.
            assert e.fetch(1) == [False]
            saves = e.tiers.stats().stores["mooncake"].calls["save"]
            for n in range(3, 24):
                e.sink(n)
                until(lambda: e.tiers._lanes["mooncake"].waiting == 0, e.tiers)
                if e.tiers.stats().stores["mooncake"].calls["save"].done > saves.done:
                    break
                time.sleep(0.2)
            e.tiers._pool.drop(key(n))
            assert e.fetch(n) == [True]


@needs_mooncake
def test_objects_larger_than_the_shared_memory_make_it_grow() -> None:
    link, store = shared(None)
    with engine(link) as e:
        until(lambda: e.tiers.stats().stores["mooncake"].is_open, e.tiers)
        for n, size in enumerate((1000, 9 << 20, 1001)):
            data = memoryview(bytearray(os.urandom(size)))
            assert store.save([key(100 + n)], [data]) == [True]
            back = memoryview(bytearray(size))
            assert store.load([key(100 + n)], [back]) == [True]
            assert back == data
            assert store.load([key(100 + n)], [memoryview(bytearray(size + 1))]) == [False]


@needs_mooncake
def test_a_full_store_takes_less_and_nothing_fails() -> None:
    link, _ = shared(None)
    with engine(link, host=60) as e:
        store = link.store
        until(lambda: e.tiers.stats().stores["mooncake"].is_open, e.tiers)
        size = 2 << 20
        buffer = memoryview(bytearray(size))
        saved = store.save([key(n) for n in range(100, 112)], [buffer] * 12)
        assert 0 < sum(saved) < 12
        assert e.sink(1) == [True]


@needs_mooncake
def test_nobody_at_the_masters_address_is_an_error_of_opening() -> None:
    with engine(shared("127.0.0.1:1", limit_s=5.0)[0]) as e:
        assert e.sink(1) == [True]
        until(lambda: e.tiers.stats().stores["mooncake"].last_error != "", e.tiers)
        assert not e.tiers.stats().stores["mooncake"].is_open
        assert e.fetch(1) == [True]


OWNER = """
import sys
from pathlib import Path
from treadle.runtime.state.tiers.mooncake_master import MooncakeMaster
service = MooncakeMaster(Path(sys.argv[1]))
print(service._process.pid, flush=True)
sys.stdin.read()
"""


@needs_mooncake
def test_the_master_ends_with_an_engine_that_is_killed() -> None:
    command = [sys.executable, "-P", "-c", OWNER, str(master_program())]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    child = child_of(int(owner.stdout.readline()))
    assert Path(f"/proc/{child}").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    end = time.monotonic() + 20
    while Path(f"/proc/{child}/exe").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("reason", "works"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("No module named 'mooncake'", "pip install 'treadle[mooncake]'"),
    ],
)
def test_what_is_missing_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch, reason: str, works: str) -> None:
    monkeypatch.setattr(mooncake, "import_problem", lambda: reason)
    with pytest.raises(ConfigError) as refusal:
        MooncakeStore(MooncakeOptions())
    assert works in str(refusal.value)


def test_a_master_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.runtime.state.tiers.mooncake_master.START_S", 0.2)
    with pytest.raises(StoreError, match="does not answer"):
        MooncakeMaster(Path("/bin/true"))
