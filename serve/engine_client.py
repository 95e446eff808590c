"""The HTTP process's end of the two sockets: requests go out, each request's outputs come back as a stream.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from treadle.runtime.protocol import (
    Endpoints,
    Heartbeat,
    Inbound,
    Outbound,
    Progress,
    Ready,
    Shutdown,
    decode_outbound,
    encode,
)
from treadle.runtime.request import Abort, Output, Request, Stats

SILENCE_LIMIT_S = 6.0
"""without a heartbeat for so long the engine process hangs: it beats every second, busy or not"""

STEP_LIMIT_S = 120.0
"""a single step that takes longer makes no progress; a long prompt is many steps"""


class Stream:
    """The outputs of one request. Leaving it early, by ``close`` or an exception in the consumer, frees its slot."""

    def __init__(self, request: Request, client: EngineClient) -> None:
        self.id = request.id
        self._client = client
        self._pending: list[Output] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def push(self, output: Output) -> None:
        """Add an output; the consumer takes what has gathered in one go."""
        self._pending.append(output)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream by an error, after what has already arrived."""
        self._error = error
        self._wake.set()

    async def take(self) -> list[Output]:
        """Return the outputs since the last time, at least one. Raises what ``fail`` got once they are taken."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        taken, self._pending = self._pending, []
        return taken

    def close(self, keep: int | None = None) -> None:
        """End the request, if the engine has not; after a stop string ``keep`` of its tokens count."""
        if self._client.forget(self.id):
            self._client.send(Abort(id=self.id, keep=keep))


class EngineClient:
    """Sends requests to the engine process and spreads its outputs over the streams that wait for them."""

    def __init__(self, endpoints: Endpoints, capacity: int) -> None:
        """Bind both sockets. ``capacity`` is how many requests may be in flight, running and waiting together."""
        self.capacity = capacity
        self._context = zmq.asyncio.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set_hwm(0)
        self._receiver.bind(endpoints.outputs)
        # A plain socket on the same context: a send to an unbounded queue never waits, so it needs no future.
        self._sender = zmq.Socket(zmq.Context(self._context), zmq.PUSH)
        self._sender.set_hwm(0)
        self._sender.bind(endpoints.requests)
        self._streams: dict[str, Stream] = {}
        self._death: Exception | None = None
        self._beat_s = time.monotonic()
        self._step_s = 0.0
        self._receive: asyncio.Task[None] | None = None
        self.stats = Stats()
        self.ready: asyncio.Event = asyncio.Event()

    def start(self, on_progress: Callable[[Progress], None]) -> None:
        """Begin to receive. ``on_progress`` gets the start-up's phases."""
        self._receive = asyncio.get_running_loop().create_task(self._run(on_progress))

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._streams)

    def submit(self, request: Request) -> Stream:
        """Send a request and return its stream. Raises EngineDiedError, if it did."""
        if self._death is not None:
            raise self._death
        stream = Stream(request, self)
        # Only what was sent is ended by an answer, and may count as under way.
        self.send(request)
        self._streams[request.id] = stream
        return stream

    def send(self, message: Inbound) -> None:
        """Send one message, if there is still somebody to read it."""
        # Again: the engine process is not there, or no longer; its exit is noticed elsewhere.
        if self._death is None:
            with suppress(zmq.Again):
                self._sender.send(encode([message]), zmq.NOBLOCK)

    def forget(self, request_id: str) -> bool:
        """Drop a stream; False if it had gone already."""
        return self._streams.pop(request_id, None) is not None

    def fail(self, error: Exception) -> None:
        """Refuse requests from now on and end every stream by ``error``."""
        self._death = error
        self.end_all(error)

    def end_all(self, error: Exception) -> None:
        """End every stream by ``error`` and free its slot."""
        for stream in list(self._streams.values()):
            stream.close()
            stream.fail(error)

    def trouble(self) -> str | None:
        """Return why the engine is not healthy, or None. A long prompt is not trouble; a stopped process is."""
        if self._death is not None:
            return str(self._death)
        silence_s = time.monotonic() - self._beat_s
        if silence_s > SILENCE_LIMIT_S:
            return f"the engine process has not been heard of for {silence_s:.0f} s"
        if self._step_s > STEP_LIMIT_S:
            return f"the engine's step has run for {self._step_s:.0f} s"
        return None

    async def close(self) -> None:
        """Tell the engine process to leave and close the sockets."""
        self.send(Shutdown())
        if self._receive is not None:
            self._receive.cancel()
            await asyncio.gather(self._receive, return_exceptions=True)
        self._receiver.close(linger=0)
        self._sender.close(linger=1000)
        self._context.term()

    async def _run(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            packet = await self._receiver.recv()
            for message in decode_outbound(packet):
                self._take(message, on_progress)

    def _take(self, message: Outbound, on_progress: Callable[[Progress], None]) -> None:
        match message:
            case Output():
                stream = self._streams.get(message.id)
                if stream is not None:
                    stream.push(message)
                    if message.finish_reason is not None:
                        del self._streams[message.id]
            case Stats():
                self.stats = message
            case Heartbeat():
                self._beat_s, self._step_s = time.monotonic(), message.step_s
            case Progress():
                on_progress(message)
            case Ready():
                self.stats = message.stats
                self._beat_s = time.monotonic()
                self.ready.set()
