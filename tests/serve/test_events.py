from __future__ import annotations

import asyncio
import contextlib

import pytest

from treadle.serve.errors import ApiError
from treadle.serve.events import ClientLeftError, EventStream, while_connected


class Client:
    """The two callables of an ASGI request; ``leave`` closes the connection."""

    def __init__(self):
        self.left = asyncio.Event()
        self.sent = []

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        await asyncio.sleep(0)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


class Slot:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_work_is_cancelled_when_the_client_leaves():
    cancelled = []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run():
        client = Client()
        asyncio.get_running_loop().call_later(0.05, client.left.set)
        with pytest.raises(ClientLeftError):
            await while_connected(client.receive, work())

    asyncio.run(run())
    assert cancelled


def test_the_result_and_the_error_of_work_come_through():
    async def give():
        return 5

    async def fail():
        raise ApiError(400, "no")

    async def run():
        client = Client()
        assert await while_connected(client.receive, give()) == 5
        with pytest.raises(ApiError):
            await while_connected(client.receive, fail())

    asyncio.run(run())


@pytest.mark.parametrize("end", ["complete", "api error", "bug", "left", "left at once"])
def test_the_slot_is_freed_however_a_stream_ends(end):
    async def events(client):
        yield b"data: 1\n\n"
        if end == "api error":
            raise ApiError(500, "broken")
        if end == "bug":
            raise KeyError("bug")
        if end == "left":
            client.left.set()
        if end.startswith("left"):
            await asyncio.sleep(60)
        yield b"data: [DONE]\n\n"

    async def run():
        client, slot = Client(), Slot()
        if end == "left at once":
            client.left.set()
        with contextlib.suppress(KeyError):
            await EventStream(events(client), [slot])({"type": "http"}, client.receive, client.send)
        return client, slot

    client, slot = asyncio.run(run())
    assert slot.closed == 1
    assert client.sent[0]["status"] == 200
    complete = client.sent[-1].get("more_body") is False
    assert complete == (end in ("complete", "api error"))
    assert (b"[DONE]" in client.body) == (end == "complete")
    assert (b'{"error":{"message":"broken"' in client.body) == (end == "api error")
