"""Answers the records of a batch as the engine has room for them, and leaves out those that have their answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from treadle.runtime.driver import Answer, Driver
from treadle.runtime.progress import AnswerBar
from treadle.runtime.request import Request, RequestError, spread
from treadle.runtime.text.output import OutputProcessor
from treadle.serve.batch.records import Record
from treadle.serve.batch.results import Results
from treadle.serve.errors import ApiError
from treadle.serve.openai.chat import ChatPrompt, chat_completion, chat_prompt
from treadle.serve.openai.completions import completion, completion_requests
from treadle.serve.openai.identity import Identity
from treadle.serve.openai.requests import ChatRequest
from treadle.serve.served import Served


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One complete answer."""

    request: Request
    output: OutputProcessor
    refused: bool
    """its error is the request's own fault"""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A record under way: its prompt, and those of its answers that are complete, by request id."""

    record: Record
    identity: Identity
    prompt: ChatPrompt | None
    requests: Sequence[Request]
    answers: dict[str, Finished]


class Batch:
    """One run over the records that have no answer yet. ``errors`` counts those that get none but an error."""

    def __init__(self, served: Served, driver: Driver, results: Results, bar: AnswerBar) -> None:
        self.answered = self.errors = 0
        self._served = served
        self._driver = driver
        self._results = results
        self._bar = bar
        self._pending: dict[str, Pending] = {}
        """by the ids of its requests"""

    def run(self, records: Iterator[Record]) -> None:
        """Answer ``records``; each is in the results as soon as it is complete."""
        with closing(self._driver.run(self._requests(records), raise_errors=False)) as steps:
            for answers in steps:
                for answer in answers:
                    self._take(answer)

    def _requests(self, records: Iterator[Record]) -> Iterator[Request]:
        """Yield the requests of the records that can be answered; the others get their error."""
        for record in records:
            if record.key in self._results.done:
                continue
            try:
                pending = self._prepare(record)
            except RequestError as error:
                self._fail(record, ApiError(400, str(error), param=error.field, code="invalid_value"))
            except ApiError as error:
                self._fail(record, error)
            else:
                for request in pending.requests:
                    self._pending[request.id] = pending
                yield from pending.requests

    def _prepare(self, record: Record) -> Pending:
        body = record.body
        if record.error is not None or body is None:
            raise record.error or ApiError(400, "the line has no body")
        self._served.check_model(body.model)
        identity = Identity(shown=body.request_id or f"line-{record.line}")
        prompt = None
        if isinstance(body, ChatRequest):
            prompt = chat_prompt(self._served, body, identity.internal, clamp=record.clamp)
            request = prompt.request
        else:
            (request,) = completion_requests(self._served, body, identity.internal, clamp=record.clamp)
        return Pending(record=record, identity=identity, prompt=prompt, requests=spread(request), answers={})

    def _take(self, answer: Answer) -> None:
        pending = self._pending.get(answer.request.id)
        self._bar.advance(sum(len(delta.token_ids) for delta in answer.deltas), 0)
        if pending is None or not answer.processor.finished:
            return
        pending.answers[answer.request.id] = Finished(
            request=answer.request, output=answer.processor, refused=answer.refused
        )
        if len(pending.answers) < len(pending.requests):
            return
        for request in pending.requests:
            del self._pending[request.id]
        failed = next((one for one in pending.answers.values() if one.output.error is not None), None)
        if failed is not None:
            status, code = (400, "invalid_value") if failed.refused else (500, "engine_error")
            self._fail(pending.record, ApiError(status, failed.output.error or "", code=code))
        else:
            self._succeed(pending)

    def _succeed(self, pending: Pending) -> None:
        record, served, created = pending.record, self._served, int(time.time())
        answers = [pending.answers[request.id] for request in pending.requests]
        content: Mapping[str, Any]
        if isinstance(record.body, ChatRequest):
            assert pending.prompt is not None
            content = chat_completion(served, record.body, pending.prompt, answers, pending.identity, created)
        else:
            assert record.body is not None
            content = completion(served, record.body, answers, pending.identity, created)
        self.answered += 1
        self._write(record, content, 200, pending.identity)

    def _fail(self, record: Record, error: ApiError) -> None:
        self.errors += 1
        self._write(record, error.body(), error.status, Identity(shown=f"line-{record.line}"))

    def _write(self, record: Record, content: Mapping[str, Any], status: int, identity: Identity) -> None:
        if record.openai:
            response = {"status_code": status, "request_id": identity.shown, "body": content}
            line = {"id": f"batch_req_{identity.internal}", "custom_id": record.id, "line": record.line}
            self._results.append(record, line | {"response": response, "error": None})
        else:
            frame = {"id": record.id, "line": record.line}
            own = {name: value for name, value in content.items() if name != "id"}
            self._results.append(record, frame | own)
        self._bar.advance(0, 1)
