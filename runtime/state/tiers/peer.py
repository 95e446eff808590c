"""Other engines as a store: what they hold is pulled from their host memory and disk. Nothing is pushed to them."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from treadle.conf.connector import KEY, PeerOptions
from treadle.conf.errors import ConfigError
from treadle.graph.local_files import read_secret
from treadle.runtime.state.tiers.breaker import Breaker
from treadle.runtime.state.tiers.peer_server import PeerServer
from treadle.runtime.state.tiers.store import Scope, StoreError
from treadle.runtime.state.tiers.wire import Found, Load, Lookup, Wire, greet, shared_key

MAX_KNOWN = 1 << 16
MAX_PORT = 65535


class Peer:
    """One other engine: connections to it, kept for later, and whether it answers. Safe for several threads."""

    def __init__(self, address: str, key: bytes, limit_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._key, self._limit_s = key, limit_s
        self._idle: list[Wire] = []
        self._lock = threading.Lock()
        self._breaker = Breaker(time.monotonic)

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Return for each key whether the engine holds it; None if it cannot be asked now."""
        wire = self._enter()
        if wire is None:
            return None
        try:
            wire.send(Lookup(list(keys)))
            found = wire.receive(Found).found
            if len(found) != len(keys):
                raise StoreError(f"{len(found)} answers to {len(keys)} keys")
        except (StoreError, OSError):
            self._leave(wire, well=False)
            return None
        self._leave(wire, well=True)
        return found

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers; return for each whether that was done, also if the engine is gone after some of them."""
        done: list[bool] = []
        wire = self._enter()
        if wire is not None:
            try:
                wire.send(Load(list(keys), [len(buffer) for buffer in buffers]))
                for buffer in buffers:
                    done.append(wire.receive_bytes(buffer))
            except (StoreError, OSError):
                self._leave(wire, well=False)
            else:
                self._leave(wire, well=True)
        return done + [False] * (len(keys) - len(done))

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def _enter(self) -> Wire | None:
        """Return a connection for one exchange, None if there is none to be had."""
        with self._lock:
            if not self._breaker.allows():
                return None
            wire = self._idle.pop() if self._idle else None
        if wire is not None:
            wire.limit(self._limit_s)
            return wire
        try:
            wire = Wire(socket.create_connection(self._address, self._limit_s))
        except OSError:
            self._note(well=False)
            return None
        try:
            wire.limit(self._limit_s)
            greet(wire, self._key, first=True)
        except (StoreError, OSError):
            self._leave(wire, well=False)
            return None
        return wire

    def _leave(self, wire: Wire, *, well: bool) -> None:
        self._note(well=well)
        if well:
            with self._lock:
                self._idle.append(wire)
        else:
            # The rest of an answer may still come on it, and those kept are likely as dead.
            wire.close()
            self.close()

    def _note(self, *, well: bool) -> None:
        with self._lock:
            if well:
                self._breaker.succeed()
            else:
                self._breaker.fail()


class PeerStore:
    """The engines of ``options.peers``; for others, what this engine holds, at ``options.listen``."""

    instant = False
    saves = False

    def __init__(self, options: PeerOptions, *, limit_s: float) -> None:
        """Raises ConfigError for a secret that cannot be read, and an address that cannot be listened on."""
        self._options = options
        self._listener = None if options.listen is None else _listen(options.listen)
        self._limit_s = limit_s / max(1, len(options.peers))
        self._secret = b"" if options.secret_file is None else read_secret(KEY, options.secret_file)
        self._peers: list[Peer] = []
        self._at: OrderedDict[bytes, Peer] = OrderedDict()
        self._lock = threading.Lock()
        self.server: PeerServer | None = None

    def open(self, scope: Scope) -> None:
        """Begin to listen. Peers are connected to when they are asked something."""
        key = shared_key(scope.namespace, self._secret)
        if self._listener is not None and self.server is None:
            self.server = PeerServer(self._listener, scope, key, limit_s=self._limit_s)
        self._peers = [Peer(address, key, self._limit_s) for address in self._options.peers]

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the engines in their order, each about what none before it has. Raises StoreError if none answers."""
        found, answered = [False] * len(keys), not self._peers
        for peer in self._peers:
            left = [index for index, yes in enumerate(found) if not yes]
            answer = peer.lookup([keys[index] for index in left]) if left else []
            answered |= answer is not None
            for index, yes in zip(left, answer or [], strict=False):
                found[index] = yes
                if yes:
                    self._note(keys[index], peer)
        if not answered:
            raise StoreError("no peer answers")
        return found

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Pull from the engine that had the object when it was asked, else from whoever has it."""
        done = [False] * len(keys)
        with self._lock:
            known = [self._at.get(key) for key in keys]
        for peer in self._peers:
            wanted = [i for i, at in enumerate(known) if not done[i] and at in (None, peer)]
            if wanted:
                there = peer.load([keys[i] for i in wanted], [buffers[i] for i in wanted])
                for i, yes in zip(wanted, there, strict=True):
                    done[i] = yes
        return done

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Keep nothing: others pull."""
        return [False for _ in zip(keys, buffers, strict=True)]

    def release(self, keys: Sequence[bytes]) -> None:
        """Forget who had objects."""
        with self._lock:
            for key in keys:
                self._at.pop(key, None)

    def events(self) -> list[tuple[str, bytes]]:
        """Return nothing: peers do not tell."""
        return []

    def close(self) -> None:
        """End the connections of both kinds."""
        if self.server is not None:
            self.server.close()
        elif self._listener is not None:
            self._listener.close()
        for peer in self._peers:
            peer.close()

    def usage(self) -> None:
        """Return nothing: what peers hold is theirs."""

    def _note(self, key: bytes, peer: Peer) -> None:
        with self._lock:
            self._at[key] = peer
            self._at.move_to_end(key)
            while len(self._at) > MAX_KNOWN:
                self._at.popitem(last=False)


def _listen(address: str) -> socket.socket:
    """Return a socket that takes connections; they wait for the store to open."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if int(port) > MAX_PORT:
            raise OSError(0, f"ports end at {MAX_PORT}")
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        problem = f"cannot listen there: {error.strerror}"
        raise ConfigError(problem, key=KEY, value=f"listen: {address}") from error
