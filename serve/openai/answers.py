"""What both generation endpoints share on the way back: usage, the frame around choices, and the stream of chunks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from treadle.runtime.request import Request
from treadle.runtime.text.output import Delta, OutputProcessor
from treadle.serve.events import DONE
from treadle.serve.served import Served
from treadle.serve.service import Answer


class Shown(Protocol):
    """An answer as far as it is known, wherever it runs."""

    @property
    def request(self) -> Request:
        """What was asked."""
        ...

    @property
    def output(self) -> OutputProcessor:
        """What came."""
        ...


Write = Callable[[int, Shown, Delta], bytes]
"""what answer i gained, as a JSON object"""
Open = Callable[[int, Shown], bytes | None]
"""the choice that comes before answer i's first, as a JSON object; None for none"""


class Frame:
    """The constant part of every object of one response."""

    def __init__(self, served: Served, kind: str, response_id: str, created: int) -> None:
        self.fields: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._head = b"data: " + orjson.dumps(self.fields)[:-1] + b',"choices":['

    def event(self, choice: bytes, usage: bytes | None, extra: bytes = b"") -> bytes:
        """Return one server-sent event; ``usage`` is left out if None, ``extra`` are more fields, a comma first."""
        tail = b"]" + extra + (b"}\n\n" if usage is None else b',"usage":' + usage + b"}\n\n")
        return self._head + choice + tail


async def stream(
    answers: Sequence[Answer],
    frame: Frame,
    choice: Write,
    *,
    opening: Open | None = None,
    extra: bytes = b"",
    only_opening: bool = False,
    include_usage: bool = False,
    continuous_usage: bool = False,
    cache_details: bool = False,
    shows_ids: bool = False,
) -> AsyncIterator[bytes]:
    """Yield the events of a response: one write for what a step added to an answer. Raises ApiError.

    ``extra`` are fields of the first event, a comma first. With ``only_opening`` nothing that is generated is shown.
    ``shows_ids``: choices have the ids of tokens, also of those whose text is held back.
    """

    def now() -> bytes | None:
        if not include_usage:
            return None
        return orjson.dumps(usage(answers, only_opening, cache_details)) if continuous_usage else b"null"

    opened = [False] * len(answers)
    async for index, delta in _deltas(answers):
        answer, events = answers[index], b""
        if not opened[index]:
            opened[index] = True
            first = None if opening is None else opening(index, answer)
            if first is not None:
                events, extra = frame.event(first, now(), extra), b""
        # Text that is held back, as part of a code point or of a stop string, makes no chunk.
        seen = delta.text or delta.logprobs or delta.finish_reason is not None or (shows_ids and delta.token_ids)
        if seen and not only_opening:
            events += frame.event(choice(index, answer, delta), now(), extra)
            extra = b""
        if events:
            yield events
    if include_usage:
        yield frame.event(b"", orjson.dumps(usage(answers, only_opening, cache_details)))
    yield DONE


async def finish(answers: Sequence[Answer]) -> None:
    """Wait until every answer is complete. Raises ApiError."""
    async for _ in _deltas(answers):
        pass


def usage(answers: Sequence[Shown], only_prompt: bool = False, cache_details: bool = False) -> dict[str, Any]:
    """Return the token counts of a whole response; a prompt counts once however many answers it has.

    ``cache_details`` adds where cached tokens were, and why the others had to be computed.
    """
    firsts = [answer for answer in answers if answer.request.choice == 0]
    prompt = sum(len(answer.request.prompt) for answer in firsts)
    completion = 0 if only_prompt else sum(len(answer.output.token_ids) for answer in answers)
    details: dict[str, Any] = {"cached_tokens": sum(answer.output.num_cached_tokens for answer in firsts)}
    if cache_details:
        cached, missed = Counter[str](), Counter[str]()
        for answer in firsts:
            cached.update(answer.output.cached_tokens)
            missed.update(answer.output.missed_tokens)
        # Nobody learns what others with another salt have sent.
        missed["cold"] += missed.pop("salt", 0)
        details |= {"cached_tokens_details": dict(cached), "uncached_tokens_details": dict(+missed)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def whole(content: dict[str, Any], request_id: str) -> Response:
    """Return a complete response; the client finds its id in a header too."""
    return Response(orjson.dumps(content), headers={"x-request-id": request_id}, media_type="application/json")


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
