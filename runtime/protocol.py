"""The messages between the HTTP process and the engine process, and how they are packed. No torch.

Both directions carry lists, so that a step costs one message however many requests it moved. The HTTP process binds
both ipc sockets inside a private folder; the engine process connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from treadle.runtime.request import Abort, Output, Request, Stats

HEARTBEAT_S = 1.0
"""seconds between two heartbeats of the engine process"""


class Shutdown(msgspec.Struct, kw_only=True, tag=True):
    """The HTTP process has no more requests: leave the loop."""


class Progress(msgspec.Struct, kw_only=True, tag=True):
    """Where the start-up is. ``at_s`` is on the clock of time.monotonic, which all processes of a machine share."""

    phase: str
    at_s: float
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, kw_only=True, tag=True):
    """The engine takes requests from now on. ``stats`` has the capacities."""

    at_s: float
    stats: Stats


class Heartbeat(msgspec.Struct, kw_only=True, tag=True):
    """Sent every HEARTBEAT_S by a thread of its own, whatever the step loop does."""

    step_s: float = 0.0
    """seconds that the current step has run; 0 between steps and when idle"""


Inbound = Request | Abort | Shutdown
Outbound = Output | Stats | Progress | Ready | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(list[Inbound])
_outbound = msgspec.msgpack.Decoder(list[Outbound])


def encode(messages: Sequence[Inbound] | Sequence[Outbound]) -> bytes:
    """Return one packet."""
    return _encoder.encode(messages)


def decode_inbound(packet: bytes) -> list[Inbound]:
    """Return what the HTTP process sent. Raises msgspec.DecodeError."""
    return _inbound.decode(packet)


def decode_outbound(packet: bytes) -> list[Outbound]:
    """Return what the engine process sent. Raises msgspec.DecodeError."""
    return _outbound.decode(packet)


class Failure(msgspec.Struct, kw_only=True):
    """Why the engine process exits. ``user`` marks a mistake in the configuration, which needs no traceback."""

    message: str
    user: bool = False


class Endpoints(msgspec.Struct, frozen=True):
    """The addresses and files that one HTTP process and its engine process share, all inside one private folder."""

    folder: str

    @property
    def requests(self) -> str:
        """Address of the socket towards the engine."""
        return f"ipc://{Path(self.folder) / 'requests'}"

    @property
    def outputs(self) -> str:
        """Address of the socket towards the HTTP process."""
        return f"ipc://{Path(self.folder) / 'outputs'}"

    @property
    def deployment(self) -> Path:
        """Lock file of the resolved deployment."""
        return Path(self.folder) / "deployment.lock.yaml"

    @property
    def failure(self) -> Path:
        """File with the Failure, written before an exit by error: it outlives the process, a socket's queue may not."""
        return Path(self.folder) / "failure.json"
