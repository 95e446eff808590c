"""One served model: what the routes need to turn a request into a running answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from treadle.conf.size import body_bytes, parse_bytes
from treadle.runtime.request import Request, RequestError
from treadle.runtime.text.output import Delta, OutputProcessor
from treadle.serve.drain import ShuttingDownError
from treadle.serve.engine_client import EngineClient, Stream
from treadle.serve.engine_process import EngineDiedError
from treadle.serve.errors import ApiError
from treadle.serve.metrics import Metrics, Times
from treadle.serve.served import Served

Made = TypeVar("Made")

INLINE_BYTES = 8192
"""a larger body is checked and tokenized in a thread, so that it does not hold up everybody's stream"""


class Answer:
    """A submitted request and its answer so far. ``close`` must be called, however it ends; it frees the slot."""

    def __init__(self, service: Service, request: Request, stream: Stream) -> None:
        self.request = request
        self.output = OutputProcessor(service.tokenizer, request)
        self._metrics = service.metrics
        self._stream = stream
        self._times = Times(arrival_s=request.arrival_s)
        self._failed = False
        self._closed = False

    async def next(self) -> Delta | None:
        """Return what the answer gained since the last time, None once it is complete. Raises ApiError."""
        if self.output.finished:
            return None
        try:
            outputs = await self._stream.take()
        except EngineDiedError as error:
            self._failed = True
            raise ApiError(500, str(error), code="engine_died") from error
        except ShuttingDownError as error:
            self._failed = True
            raise error.for_client() from error
        delta = join([self.output.process(output) for output in outputs])
        self._observe(delta)
        if delta.abort is not None:
            self._stream.close(delta.abort.keep)
        if delta.finish_reason == "error":
            message = delta.error or "the engine could not finish this request"
            refused = any(output.refused for output in outputs)
            raise ApiError(400 if refused else 500, message, code="invalid_value" if refused else "engine_error")
        return delta

    def close(self) -> None:
        """End the request if it still runs, and count it."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        reason = "error" if self._failed else self.output.finish_reason or "abort"
        self._metrics.finish(reason, self._times, time.monotonic(), len(self.output.token_ids))

    def _observe(self, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now, times, output, count = time.monotonic(), self._times, self.output, len(delta.token_ids)
        if times.first_s:
            self._metrics.more_tokens(now - times.last_s, count)
        else:
            times.first_s, times.queue_s = now, output.queue_s or 0.0
            # A prompt with several answers counts in the first.
            prompt_len = 0 if self.request.choice else len(self.request.prompt)
            external = sum(num for place, num in output.cached_tokens.items() if place != "device")
            self._metrics.first_tokens(times, prompt_len, output.num_cached_tokens, count, external_tokens=external)
        times.last_s = now


@dataclass(frozen=True, kw_only=True)
class Service(Served):
    """The model's text side, the way to its engine, and what the API says about it."""

    client: EngineClient
    metrics: Metrics

    @property
    def max_body_bytes(self) -> int:
        """How large a body may be."""
        most = self.config.max_body
        return body_bytes(self.limits.max_len) if most == "auto" else parse_bytes(most)

    @contextmanager
    def closing(self, answers: Sequence[Answer]) -> Iterator[None]:
        """Close ``answers`` at the end of the block."""
        try:
            yield
        finally:
            for answer in answers:
                answer.close()

    def admit(self, count: int = 1, field: str = "n") -> None:
        """Raise ApiError 429 if ``count`` more requests do not fit in the bounded queue, 400 if they never will.

        ``field`` is what asks for so many.
        """
        if count > self.client.capacity:
            message = f"{count} answers are asked for; this server runs and queues at most {self.client.capacity}"
            raise ApiError(400, message, param=field, code="invalid_value")
        if self.client.in_flight + count > self.client.capacity:
            self.metrics.refused.inc(count)
            message = f"{self.client.in_flight} requests are running or waiting; the limit is {self.client.capacity}"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})

    async def off_loop(self, make: Callable[[], Made], size: int) -> Made:
        """Return what ``make`` returns, made in a thread if the body has many bytes (``size``). Raises ApiError."""
        try:
            return make() if size <= INLINE_BYTES else await asyncio.to_thread(make)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.field, code="invalid_value") from error

    def submit(self, requests: Sequence[Request]) -> list[Answer]:
        """Hand the requests, all or none, to the engine. Raises ApiError 429, 503."""
        self.admit(len(requests))
        sizes = Counter(request.group or request.id for request in requests)
        for request in requests:
            if request.choice == 0:
                self.metrics.submitted(sizes[request.group or request.id], request.params.max_tokens or 0)
        answers: list[Answer] = []
        try:
            # Whatever keeps one of them from being sent ends those that were.
            with ExitStack() as sent:
                for request in requests:
                    answers.append(Answer(self, request, self.client.submit(request)))
                    sent.callback(answers[-1].close)
                sent.pop_all()
            return answers
        except EngineDiedError as error:
            raise ApiError(503, str(error), code="engine_died") from error


def join(deltas: Sequence[Delta]) -> Delta:
    """Return one delta that adds what ``deltas`` add one after another."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    last = next((delta for delta in deltas if delta.finish_reason is not None), deltas[-1])
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        abort=last.abort,
        error=last.error,
    )
