"""One client's connection: uvicorn's protocol with limits on what a client may send, hold and wait for.

A client that closes its side for writing counts as gone, even if it still reads: TCP shows no difference, and a slot
is freed when its client leaves.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from treadle.serve.drain import ShuttingDownError
from treadle.serve.errors import ApiError

HEAD_S = 30.0
"""seconds from the opening of a connection, or the first byte of a later request, to the end of its headers"""
MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100


class HeadTooLargeError(Exception):
    """The address or the headers of a request go beyond a limit."""


class BusyError(Exception):
    """A request arrived behind one that is still being answered."""


class Connection(HttpToolsProtocol):
    """Refuses heads that are slow (408) or large (431), and stays within ``limit_concurrency`` connections.

    Beyond that number the connection whose client has been silent longest gives way, unless it is being answered.
    Nothing that follows a request is read before its answer is complete, and then the connection closes: reading on
    would queue it, and a paused connection does not show that its client has left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._heard_s = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """of the head that is being read: what its parts had"""
        self._part_bytes = 0
        """received since the last complete part"""
        self._head_too_large = False
        self._deaf = False

    @property
    def answering(self) -> bool:
        """Whether the client has sent a whole request and waits."""
        cycle = self._unanswered
        return cycle is not None and not cycle.more_body

    @property
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request whose head has come and whose answer is not complete."""
        return None if self.cycle is None or self.cycle.response_complete else self.cycle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, and make room for this connection if there are too many."""
        super().connection_made(transport)
        self._await_head()
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
            silent = [other for other in others if not other.answering and not other.transport.is_closing()]
            if silent:
                min(silent, key=lambda other: other._heard_s).transport.close()
            else:
                self._refuse(ApiError(503, f"all {self._max_connections} connections of this server are in use"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, if it is not beyond a limit."""
        if self._deaf or self.transport.is_closing():
            return
        self._heard_s = self.loop.time()
        self._part_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._unanswered is None:
            self._await_head()

    def on_message_begin(self) -> None:
        """Count from zero."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value), headers=1)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._part_bytes = 0
        if self._unanswered is not None:
            raise BusyError
        self._head_done()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._part_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        self._part_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser, or a callback above, did not take."""
        if self.answering:
            self._deaf = True
            self.cycle.keep_alive = False
        elif self._head_too_large:
            self._refuse_head()
        else:
            self._refuse(ApiError(400, msg))

    def shutdown(self) -> None:
        """Close the connection, after the answer if its client waits for one."""
        if self._unanswered is not None and not self.answering:
            self._refuse(ShuttingDownError().for_client())
        else:
            super().shutdown()

    def _count(self, size: int, headers: int = 0) -> None:
        self._part_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) + headers > MAX_HEADERS:
            self._head_too_large = True
            raise HeadTooLargeError

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._refuse(ApiError(408, f"the headers of a request did not come within {HEAD_S:g} s"))

    def _refuse_head(self) -> None:
        message = f"address and headers take at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        self._refuse(ApiError(431, message))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, and say why unless that would come in the middle of an answer."""
        cycle = self._unanswered
        if self.transport.is_closing():
            return
        if cycle is None or not cycle.response_started:
            body = orjson.dumps(error.body())
            headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
            lines = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                *(f"{name}: {value}" for name, value in (error.headers | headers).items()),
            )
            self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
            if cycle is not None:
                cycle.disconnected = True
        self.transport.close()
