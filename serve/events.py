"""Responses that end when the client does: whoever leaves early frees what the answer was using at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.serve.errors import ApiError

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client closed its connection before the answer was complete."""


class Closing(Protocol):
    """Something that holds a slot until it is closed."""

    def close(self) -> None:
        """Free the slot."""
        ...


class EventStream(Response):
    """Server-sent events: each item of ``events`` is one write.

    An ApiError raised on the way becomes an error event, and then the stream ends without [DONE]: a client never takes
    a broken answer for a complete one. However the response ends, each of ``answers`` is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], answers: Sequence[Closing], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer."""
        # A generator that never ran has no `finally` to run, so the slots are freed here and not inside `events`.
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._write(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeftError:
            pass
        finally:
            for answer in self._answers:
                answer.close()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": sse(error.body()), "more_body": True})


def sse(data: Any) -> bytes:
    """Return one event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def until_left(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what ``work`` returns. Raises ClientLeftError, after cancelling it, if the client goes first."""
    return await while_connected(request.receive, work)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` until it is done or the client has gone. Raises ClientLeftError then, and what ``work`` raises."""
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientLeftError
        return job.result()
    finally:
        job.cancel()
        watch.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
