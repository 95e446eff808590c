"""What both generation endpoints share on the way back: usage, the frame around choices, and the stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson

from treadle.runtime.text.output import Delta
from treadle.serve.events import DONE
from treadle.serve.service import Answer, Service


class Frame:
    """The constant part of every object of one response."""

    def __init__(self, service: Service, kind: str, response_id: str, created: int) -> None:
        self.fields: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._head = b"data: " + orjson.dumps(self.fields)[:-1] + b',"choices":['

    def event(self, choice: bytes, usage: bytes | None) -> bytes:
        """Return one server-sent event; ``usage`` is left out if None."""
        tail = b"]}\n\n" if usage is None else b'],"usage":' + usage + b"}\n\n"
        return self._head + choice + tail


async def stream(
    answers: Sequence[Answer],
    frame: Frame,
    choice: Callable[[int, Delta], bytes],
    *,
    opening: Callable[[int], bytes] | None = None,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Yield the events of a response: one write for what a step added to an answer. Raises ApiError.

    ``choice`` writes what answer i gained as a JSON object, ``opening`` the choice that comes before the first.
    """
    no_usage = b"null" if include_usage else None
    opened = [False] * len(answers)
    async for index, delta in _deltas(answers):
        events = b""
        if opening is not None and not opened[index]:
            opened[index] = True
            events = frame.event(opening(index), no_usage)
        # Text that is held back, as part of a code point or of a stop string, makes no chunk.
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            events += frame.event(choice(index, delta), no_usage)
        if events:
            yield events
    if include_usage:
        yield frame.event(b"", orjson.dumps(usage(answers)))
    yield DONE


async def finish(answers: Sequence[Answer]) -> None:
    """Wait until every answer is complete. Raises ApiError."""
    async for _ in _deltas(answers):
        pass


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the token counts of a whole response."""
    prompt = sum(len(answer.request.prompt) for answer in answers)
    completion = sum(len(answer.output.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.output.num_cached_tokens for answer in answers)},
    }


async def _deltas(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield what each answer gains, as it comes. Raises ApiError."""
    if len(answers) == 1:
        while (delta := await answers[0].next()) is not None:
            yield 0, delta
        return
    waits = {asyncio.ensure_future(answer.next()): i for i, answer in enumerate(answers)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waits.pop(task)
                delta = task.result()
                if delta is not None:
                    waits[asyncio.ensure_future(answers[index].next())] = index
                    yield index, delta
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
