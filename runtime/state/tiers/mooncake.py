"""A Mooncake store as a connector: engines lend memory to it, and a master knows where objects are.

Needs the extra ``treadle[mooncake]`` and the system's libibverbs.so.1, also without RDMA. The client lives in a process
of its own (``mooncake_worker``); objects pass through memory that is shared with it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from treadle.conf.connector import KEY, MooncakeOptions
from treadle.conf.errors import ConfigError
from treadle.conf.size import parse_bytes
from treadle.runtime.state.tiers.mooncake_master import MooncakeMaster, answers
from treadle.runtime.state.tiers.mooncake_worker import CLOSE_S, SETUP_S, Answer, Ask, Setup, offsets
from treadle.runtime.state.tiers.store import Scope, StoreError
from treadle.runtime.state.tiers.wire import Wire

CHANNELS = 4
"""Calls that may be under way: as many as a lane has threads."""
LEAST_MEMORY = 8 << 20
ANSWER_S = 60.0
"""Seconds after which the client is taken for dead; it gives up its own calls sooner."""
_UNREACHABLE = -900
"""Codes from here down: the master or another engine did not answer."""


class Channel:
    """A socket of the client's process, and memory that both map, which grows as calls need it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.wire = Wire(connection)
        self._memory: mmap.mmap | None = None
        self._address = 0

    def ask(self, call: str, names: list[str], buffers: Sequence[memoryview] = ()) -> list[int]:
        """Return the codes of one call. Raises StoreError or OSError if the client is gone."""
        sizes = [len(buffer) for buffer in buffers]
        *begins, end = offsets(sizes)
        self.wire.limit(ANSWER_S)
        grown = self._grow(end)
        if call == "save":
            for begin, buffer in zip(begins, buffers, strict=True):
                # Unlike an assignment of slices, this lets other threads run.
                ctypes.memmove(self._address + begin, _address(buffer), len(buffer))
        self.wire.send(Ask(call, names, sizes, 0 if grown is None else len(self._mapped())))
        if grown is not None:
            socket.send_fds(self._socket, [b"m"], [grown])
            os.close(grown)
        codes = self.wire.receive(Answer).codes
        if len(codes) != len(names):
            raise StoreError(f"{len(codes)} answers to {len(names)} keys")
        if call == "load":
            for begin, buffer, code in zip(begins, buffers, codes, strict=True):
                if code == len(buffer):
                    ctypes.memmove(_address(buffer), self._address + begin, len(buffer))
        return codes

    def _grow(self, size: int) -> int | None:
        """Map at least ``size`` bytes; return the descriptor of new memory, None if there is enough."""
        if self._memory is not None and len(self._memory) >= size:
            return None
        size = max(LEAST_MEMORY, 1 << (size - 1).bit_length() if size else 0)
        descriptor = os.memfd_create("treadle-mooncake")
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return descriptor

    def _mapped(self) -> mmap.mmap:
        assert self._memory is not None
        return self._memory


class Client:
    """The process of the client. Raises StoreError if it cannot connect."""

    def __init__(self, setup: Setup) -> None:
        pairs = [socket.socketpair() for _ in range(CHANNELS)]
        theirs = [pair[1].fileno() for pair in pairs]
        module = "treadle.runtime.state.tiers.mooncake_worker"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            # It tells much, and nothing that the codes of its calls do not.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _, other in pairs:
            other.close()
        self._channels = [Channel(mine) for mine, _ in pairs]
        self._free: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        for channel in self._channels:
            self._free.put(channel)
        try:
            self._channels[0].wire.limit(SETUP_S + CLOSE_S)
            self._channels[0].wire.send(setup)
            code = self._channels[0].wire.receive(Answer).codes[0]
        except (StoreError, OSError) as error:
            self.close()
            raise StoreError(f"no Mooncake client for the master at {setup.master}: {error}") from error
        if code != 0:
            self.close()
            raise StoreError(f"the Mooncake master at {setup.master} does not take this engine: {code}")

    def ask(self, call: str, names: list[str], buffers: Sequence[memoryview] = ()) -> list[int]:
        """Make one call. Raises StoreError or OSError if the client is gone, or nobody answered it."""
        channel = self._free.get()
        try:
            codes = channel.ask(call, names, buffers)
        finally:
            self._free.put(channel)
        if codes and all(code <= _UNREACHABLE for code in codes):
            raise StoreError(f"the Mooncake store does not answer: {codes[0]}")
        return codes

    def kill(self) -> None:
        """End the process at once; calls that wait for it fail."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Let the client leave the store, within a few seconds."""
        for channel in self._channels:
            channel.wire.close()
        try:
            self._process.wait(CLOSE_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class MooncakeStore:
    """Objects of all engines under one master, each in one place."""

    instant = False
    saves = True

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises ConfigError if the package, or a library that it needs, is not installed."""
        _refuse_missing()
        self._options = options
        self._prefix = ""
        self._client: Client | None = None
        self._lock = threading.Lock()
        self.master: MooncakeMaster | None = None

    def open(self, scope: Scope) -> None:
        """Connect to the master, or start one, and lend memory."""
        self._prefix = f"treadle/{scope.namespace.hex()}/"
        self._connect()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the master."""
        return [code == 1 for code in self._ask("lookup", keys)]

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy objects of just the buffers' lengths from where they are."""
        codes = self._ask("load", keys, buffers)
        return [code == len(buffer) for code, buffer in zip(codes, buffers, strict=True)]

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Put objects where there is room; where there is none, the store evicts, and takes later ones."""
        return [code == 0 for code in self._ask("save", keys, buffers)]

    def release(self, keys: Sequence[bytes]) -> None:
        """Remove objects; one that somebody reads stays until its lease ends."""
        self._ask("release", keys)

    def events(self) -> list[tuple[str, bytes]]:
        """Return nothing: the master tells whom it was told to."""
        return []

    def close(self) -> None:
        """Leave the store, with the memory that was lent and what is in it."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.master is not None:
            self.master.close()

    def usage(self) -> None:
        """Return nothing: the master knows."""

    def _ask(self, call: str, keys: Sequence[bytes], buffers: Sequence[memoryview] = ()) -> list[int]:
        client = self._connect()
        try:
            return client.ask(call, [self._prefix + key.hex() for key in keys], buffers)
        except (StoreError, OSError) as error:
            if "the Mooncake store does not answer" not in str(error):
                self._abandon(client)
            raise

    def _connect(self) -> Client:
        """Return the client, a new one if the last is gone."""
        options = self._options
        with self._lock:
            if self._client is None:
                if options.master is None and self.master is None:
                    self.master = MooncakeMaster(master_program())
                master = self.master.address if self.master is not None else options.master or ""
                # The client would try for a minute and a half.
                if not answers(master):
                    raise StoreError(f"no Mooncake master answers at {master}")
                lent = parse_bytes(options.memory)
                self._client = Client(Setup(options.host, lent, options.protocol, options.devices, master))
            return self._client

    def _abandon(self, client: Client) -> None:
        """Give up a client that does not do its work; calls of other threads end with it."""
        with self._lock:
            if self._client is client:
                self._client = None
                client.kill()


def master_program() -> Path:
    """Return the path of the master that comes with the package."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "mooncake_master"


def import_problem() -> str:
    """Return why the package cannot be used, empty if it can. It is tried in another process."""
    command = [sys.executable, "-P", "-c", "import mooncake.store"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _refuse_missing() -> None:
    problem = import_problem()
    if problem:
        library = "libibverbs" in problem
        raise ConfigError(
            f"the connector cannot be loaded: {problem}",
            key=KEY,
            value="mooncake",
            hint="apt-get install libibverbs1" if library else "pip install 'treadle[mooncake]'",
        )


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
