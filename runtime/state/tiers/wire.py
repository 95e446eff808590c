"""Messages between engines: a length, a msgpack body, and raw bytes behind it that are never copied in this process.

Both sides prove at the beginning that they serve the same model in the same layout, and know the same secret if there
is one, without sending either.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Annotated, TypeVar

import msgspec

from treadle.runtime.state.tiers.store import StoreError

MAX_MESSAGE = 1 << 20
_LENGTH = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_NONCE_BYTES = 32


Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Lookup(msgspec.Struct, tag="lookup", frozen=True):
    """Which of these are there? Answered by Found."""

    keys: list[Key]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Send these. Answered, for each in its turn, by its size and its bytes; a size of 0 if it is not there."""

    keys: list[Key]
    sizes: list[Size]


class Found(msgspec.Struct, frozen=True):
    """The answer to Lookup."""

    found: list[bool]


class Hello(msgspec.Struct, frozen=True):
    """A challenge, and the answer to the other side's, empty before there was one."""

    nonce: bytes
    proof: bytes


Request = Lookup | Load
T = TypeVar("T")


class Wire:
    """A connection on which nothing takes longer than a limit. Raises StoreError or OSError when it does not work."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._end: float | None = None

    def limit(self, seconds: float | None) -> None:
        """Let all that follows take ``seconds`` together; None: as long as it likes."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        body = msgspec.msgpack.encode(message)
        self._send(memoryview(_LENGTH.pack(len(body)) + body))

    def receive(self, kind: type[T]) -> T:
        """Return the next message."""
        size = _LENGTH.unpack(self._receive(_LENGTH.size))[0]
        if size > MAX_MESSAGE:
            raise StoreError(f"a message of {size} bytes")
        try:
            return msgspec.msgpack.decode(self._receive(size), type=kind)
        except msgspec.MsgspecError as error:
            raise StoreError(f"no {kind}: {error}") from error

    def send_bytes(self, data: memoryview | None) -> None:
        """Send the size of an object and the object; None: a size of 0."""
        self._send(memoryview(_SIZE.pack(0 if data is None else len(data))))
        if data is not None:
            self._send(data)

    def receive_bytes(self, target: memoryview) -> bool:
        """Fill ``target`` with the next object; whether there was one. It has the target's size or none."""
        size = _SIZE.unpack(self._receive(_SIZE.size))[0]
        if size == 0:
            return False
        if size != len(target):
            raise StoreError(f"an object of {size} bytes, {len(target)} were asked for")
        self._fill(target)
        return True

    def close(self) -> None:
        """End the connection; what another thread waits for on it fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, data: memoryview) -> None:
        while data:
            self._set_timeout()
            data = data[self._socket.send(data) :]

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, target: memoryview) -> None:
        while target:
            self._set_timeout()
            count = self._socket.recv_into(target)
            if count == 0:
                raise StoreError("the other side ended the connection")
            target = target[count:]

    def _set_timeout(self) -> None:
        left = None if self._end is None else self._end - time.monotonic()
        if left is not None and left <= 0:
            raise StoreError("the other side is too slow")
        self._socket.settimeout(left)


def greet(wire: Wire, key: bytes, *, first: bool) -> None:
    """Prove to the other side that this one has ``key``, and be proved the same. Raises StoreError if it does not.

    ``first`` is the side that connected; the two sides' proofs differ, so that none can be sent back.
    """
    nonce = os.urandom(_NONCE_BYTES)
    wire.send(Hello(nonce, b""))
    theirs = wire.receive(Hello)
    wire.send(Hello(b"", _proof(key, first, theirs.nonce, nonce)))
    answer = wire.receive(Hello)
    if not hmac.compare_digest(answer.proof, _proof(key, not first, nonce, theirs.nonce)):
        raise StoreError("the other side serves another model, or has another secret")


def shared_key(namespace: bytes, secret: bytes) -> bytes:
    """Return what both sides must have."""
    return hashlib.sha256(namespace + secret).digest()


def _proof(key: bytes, first: bool, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(key, (b"first" if first else b"second") + challenge + own, "sha256")
