"""Steps an engine in this process and hands its outputs to the requests they belong to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple, Protocol

from treadle.runtime.completion import RequestMetrics
from treadle.runtime.request import Abort, Output, QueueFull, Request, RequestError
from treadle.runtime.text.output import Delta, OutputProcessor
from treadle.runtime.text.tokenizer import Tokenizer


class StepEngine(Protocol):
    """What the driver needs of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull if it may be tried again later."""

    def abort(self, abort: Abort) -> None:
        """End a request; unknown ids are ignored."""

    def step(self) -> list[Output]:
        """Run one step and return the new tokens."""

    def close(self) -> None:
        """Release what the engine holds."""


class Answer:
    """One running request: its text so far, the deltas nobody took yet, and its times."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.request = request
        self.processor = OutputProcessor(tokenizer, request)
        self.deltas: list[Delta] = []
        self.refused = False
        """its error is the request's own fault"""
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    def take(self, output: Output) -> Delta:
        """Add one Output."""
        delta = self.processor.process(output)
        self.refused = self.refused or output.refused
        now = time.monotonic()
        if delta.token_ids and self._first_token_s is None:
            self._first_token_s = now
        if self.processor.finished:
            self._finished_s = now
        self.deltas.append(delta)
        return delta

    def metrics(self) -> RequestMetrics:
        """Return the times."""
        return RequestMetrics(
            arrival_time=self.request.arrival_s,
            first_token_time=self._first_token_s,
            finished_time=self._finished_s,
            time_in_queue=self.processor.queue_s,
        )


class _Run(NamedTuple):
    """The requests of one call of ``Driver.run``."""

    source: Iterator[Request]
    unfinished: dict[str, Answer]
    waiting: deque[Answer]
    """at most one: the engine had no room for it"""
    fresh: dict[str, Answer]
    """those with deltas that the caller has not seen"""


class Driver:
    """Runs requests on one engine. Several runs may be open at a time; one thread only."""

    def __init__(self, engine: StepEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._running: dict[str, tuple[Answer, _Run]] = {}

    def run(self, requests: Iterable[Request], *, raise_errors: bool = True) -> Generator[list[Answer], None, None]:
        """Yield after every step the answers of ``requests`` that got something new, until all are finished.

        ``requests`` are taken as the engine has room for them. What is unfinished is aborted when the caller stops
        early or an error ends the run. Raises RequestError if the engine cannot go on with a request; without
        ``raise_errors`` that answer is finished with the error, and the others go on.
        """
        run = _Run(iter(requests), {}, deque(), {})
        try:
            while True:
                self._feed(run, raise_errors)
                if not run.unfinished and not run.waiting:
                    return
                if not run.fresh:
                    self._step()
                    continue
                fresh = list(run.fresh.values())
                run.fresh.clear()
                yield fresh
                for answer in fresh:
                    answer.deltas.clear()
                    if answer.processor.error is not None and raise_errors:
                        raise RequestError(f"request {answer.request.id} failed: {answer.processor.error}")
                    if answer.processor.finished:
                        del run.unfinished[answer.request.id]
        finally:
            for name in run.unfinished.keys() & self._running.keys():
                del self._running[name]
                self._engine.abort(Abort(id=name))

    def close(self) -> None:
        """Abort what runs and release the engine."""
        for name in self._running:
            self._engine.abort(Abort(id=name))
        self._running.clear()
        self._engine.close()

    def _feed(self, run: _Run, raise_errors: bool) -> None:
        """Queue as many requests as the engine takes."""
        while True:
            if not run.waiting:
                request = next(run.source, None)
                if request is None:
                    return
                run.waiting.append(Answer(self._tokenizer, request))
            answer = run.waiting[0]
            name = answer.request.id
            try:
                self._engine.add(answer.request)
                self._running[name] = answer, run
            except QueueFull:
                return
            except RequestError as error:
                if raise_errors:
                    raise
                answer.take(Output(id=name, token_ids=[], finish_reason="error", error=str(error), refused=True))
                run.fresh[name] = answer
            run.unfinished[name] = answer
            run.waiting.popleft()

    def _step(self) -> None:
        assert self._engine.has_work, f"the engine forgot {len(self._running)} requests"
        for output in self._engine.step():
            answer, run = self._running.get(output.id, (None, None))
            if answer is None or run is None:  # aborted, or ended by a stop string that the engine learnt of later
                continue
            delta = answer.take(output)
            run.fresh[output.id] = answer
            if delta.abort is not None:
                self._engine.abort(delta.abort)
            if answer.processor.finished:
                del self._running[output.id]
