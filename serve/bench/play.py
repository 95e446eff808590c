"""Playing requests on an engine: prompts in, the time of every token out. Treadle and its rivals are players alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from treadle.runtime.garbage import Garbage
from treadle.runtime.request import Output, Request, SamplingParams, Stats


@dataclass
class Trace:
    """One request: when it arrived and when each of its tokens came, in seconds of one clock."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """the answer itself, from engines that give it"""

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [later - before for before, later in pairwise(self.token_s)]


class Player(Protocol):
    """An engine that takes prompts."""

    def play(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, at_s: Sequence[float] | None = None
    ) -> list[Trace]:
        """Return a trace of each prompt, after ``num_tokens`` tokens whatever they are.

        ``at_s``, ascending, says when each request arrives, in seconds from the start; without it all arrive at once.
        """
        ...


class CountingPlayer(Player, Protocol):
    """An engine that also says what it computed."""

    def computed_tokens(self) -> int:
        """Return how many tokens were fed to the program so far, those of prompts and of answers alike."""
        ...


class StepEngine(Protocol):
    """What playing needs of treadle's engine."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[Output]:
        """Run one step and return new tokens."""
        ...

    def stats(self) -> Stats:
        """Return gauges and counters."""
        ...


class EnginePlayer:
    """Plays on an engine in this process, timed from outside of it."""

    def __init__(self, engine: StepEngine, garbage: Garbage, *, temperature: float = 0.0) -> None:
        self._engine, self._garbage, self._temperature = engine, garbage, temperature
        self._played = 0

    def computed_tokens(self) -> int:
        """Return how many tokens were fed to the program so far."""
        return self._engine.stats().computed_tokens

    def play(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, at_s: Sequence[float] | None = None
    ) -> list[Trace]:
        """Return a trace of each prompt. Raises RuntimeError if the engine fails with one."""
        engine = self._engine
        params = SamplingParams(temperature=self._temperature, max_tokens=num_tokens, ignore_eos=True)
        first, self._played = self._played, self._played + len(prompts)
        requests = [Request(id=str(first + i), prompt=list(prompt), params=params) for i, prompt in enumerate(prompts)]
        start_s = time.perf_counter()
        coming = deque(zip(requests, at_s if at_s is not None else [0.0] * len(requests)))
        traces = {request.id: Trace(start_s + after_s) for request, after_s in coming}
        while coming or engine.has_work:
            while coming and start_s + coming[0][1] <= time.perf_counter():
                engine.add(coming.popleft()[0])
            if not engine.has_work:
                time.sleep(max(start_s + coming[0][1] - time.perf_counter(), 0.0))
                continue
            outputs, now_s = engine.step(), time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"request {output.id} failed: {output.error}")
                traces[output.id].token_s += [now_s] * len(output.token_ids)
                traces[output.id].tokens += output.token_ids
            self._garbage.look(idle=not engine.has_work)
        return list(traces.values())
