"""Gives other engines what this one holds outside its device."""

from __future__ import annotations

import contextlib
import socket
import threading

from treadle.runtime.state.tiers.store import Scope
from treadle.runtime.state.tiers.wire import Found, Load, Lookup, Request, Wire, greet

GREETING_S = 5.0
MAX_CONNECTIONS = 64


class PeerServer:
    """Listens until it is closed; each connection has a thread, which holds one object at a time while it sends it."""

    def __init__(self, listener: socket.socket, scope: Scope, key: bytes, *, limit_s: float) -> None:
        """``listener`` is the server's from now on; ``limit_s``: seconds that an answer may take the other side to
        read."""
        self._scope, self._key, self._limit_s = scope, key, limit_s
        self._socket = listener
        self.port: int = listener.getsockname()[1]
        self._wires: set[Wire] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.sent_bytes = 0
        self.turned_away = 0
        self._thread = threading.Thread(target=self._accept, name="peer accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        # Closing alone does not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()
        self._thread.join(1.0)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Too many files are open, perhaps; not for ever.
                if self._closing.wait(0.1):
                    return
                continue
            wire = Wire(connection)
            with self._lock:
                full = len(self._wires) >= MAX_CONNECTIONS
                if not full:
                    self._wires.add(wire)
            if full:
                self.turned_away += 1
                wire.close()
            else:
                threading.Thread(target=self._serve, args=(wire,), name="peer", daemon=True).start()

    def _serve(self, wire: Wire) -> None:
        try:
            wire.limit(GREETING_S)
            greet(wire, self._key, first=False)
            while not self._closing.is_set():
                # Nothing is held while the other side has nothing to ask.
                wire.limit(None)
                request: Request = wire.receive(Request)  # type: ignore[arg-type]
                wire.limit(self._limit_s)
                self._answer(wire, request)
        except OSError:
            # The other side is gone.
            pass
        # Whatever it sent costs its own connection.
        except Exception:
            self.turned_away += 1
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.close()

    def _answer(self, wire: Wire, request: Request) -> None:
        match request:
            case Lookup(keys=keys):
                wire.send(Found(list(self._scope.holds(keys))))
            case Load(keys=keys, sizes=sizes):
                for key, size in zip(keys, sizes, strict=False):
                    with self._scope.offer(key, size) as data:
                        wire.send_bytes(data)
                        self.sent_bytes += 0 if data is None else len(data)
