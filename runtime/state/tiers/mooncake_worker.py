"""The process in which Mooncake's client lives: ``python -m treadle.runtime.state.tiers.mooncake_worker FD...``

Parts of the client are native code that keeps the interpreter from running anything else, for as long as its master
does not answer; other parts end the process. Here that costs nobody a step. Each descriptor is a socket on which one
call at a time is asked for; objects are in memory that both processes map.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec

from treadle.runtime.state.tiers.store import StoreError
from treadle.runtime.state.tiers.wire import Wire

SETUP_S = 20
CLOSE_S = 5
LOCAL_BYTES = 16 << 20
"""Memory of the client's own, which what goes through registered buffers does not need."""
ALIGN = 256


class Setup(msgspec.Struct, frozen=True):
    """Connect to a master, and lend memory. Answered by Answer."""

    host: str
    lent: int
    protocol: str
    devices: str
    master: str


class Ask(msgspec.Struct, frozen=True):
    """Call the store. Objects are one behind the other in the socket's memory, each at a multiple of ALIGN."""

    call: str
    names: list[str]
    sizes: list[int]
    memory: int = 0
    """bytes of new memory, whose descriptor follows; 0: the one before"""


class Answer(msgspec.Struct, frozen=True):
    """What the store returned for each name."""

    codes: list[int]


def offsets(sizes: list[int]) -> list[int]:
    """Return where objects of these sizes begin, and where the last one ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // ALIGN) * ALIGN)
    return found


class Channel:
    """Serves the calls of one socket, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.wire = Wire(connection)
        self._memory: mmap.mmap | None = None
        self._address = 0

    def serve(self, store: Any) -> None:
        """Answer until the other side is gone."""
        while True:
            ask = self.wire.receive(Ask)
            if ask.memory:
                self._map(store, ask.memory)
            self.wire.send(Answer(self._call(store, ask)))

    def _map(self, store: Any, size: int) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if self._memory is not None:
            store.unregister_buffer(self._address)
        # The old mapping goes with its last user; the address is what the store knows.
        self._memory = mmap.mmap(descriptors[0], size)
        os.close(descriptors[0])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        store.register_buffer(self._address, size)

    def _call(self, store: Any, ask: Ask) -> list[int]:
        addresses = [self._address + offset for offset in offsets(ask.sizes)[:-1]]
        match ask.call:
            case "lookup":
                return list(store.batch_is_exist(ask.names))
            case "load":
                return list(store.batch_get_into(ask.names, addresses, ask.sizes))
            case "save":
                return list(store.batch_put_from(ask.names, addresses, ask.sizes))
            case _:
                return [store.remove(name) for name in ask.names]


def main(descriptors: list[int]) -> None:
    """Connect as the first socket says, then serve all of them until one is closed."""
    channels = [Channel(socket.socket(fileno=descriptor)) for descriptor in descriptors]
    setup = channels[0].wire.receive(Setup)
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    # A signal that nobody handles ends the process also while native code runs.
    signal.alarm(SETUP_S)
    # No separate service for metadata: engines tell each other.
    code = store.setup(setup.host, "P2PHANDSHAKE", setup.lent, LOCAL_BYTES, setup.protocol, setup.devices, setup.master)
    signal.alarm(0)
    channels[0].wire.send(Answer([code]))
    ended = threading.Event()

    def serve(channel: Channel) -> None:
        # The engine is gone, or done.
        with contextlib.suppress(StoreError, OSError):
            channel.serve(store)
        ended.set()

    for channel in channels:
        threading.Thread(target=serve, args=(channel,), daemon=True).start()
    ended.wait()
    signal.alarm(CLOSE_S)
    store.close()
    os._exit(0)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
