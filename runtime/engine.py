"""The step loop: schedule, launch, collect; the next step is scheduled while the last one runs."""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from treadle.graph.buckets import Buckets
from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_STOPS, StepShape
from treadle.graph.state import State
from treadle.kernels.backend.protocol import Backend, Event, Stream
from treadle.runtime.plan import Plan
from treadle.runtime.processors import make_processors
from treadle.runtime.request import (
    STEP_TOKENS,
    Abort,
    FinishReason,
    Output,
    QueueFull,
    Request,
    RequestError,
    Stats,
    TokenLogprob,
    check_cache,
    check_choice,
)
from treadle.runtime.sampler import Samples, Scores
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequence import Sequence, tokens_of
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.checkpoints import CheckpointPolicy
from treadle.runtime.state.memory import StateMemory
from treadle.runtime.state.report import report
from treadle.runtime.state.tiers.tiers import Tiers
from treadle.runtime.stepper import Executor, Stepper

log = logging.getLogger(__name__)

TRANSFER_WAIT_S = 0.002
"""How long a loop without a step waits for a transfer before it looks for requests again."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits of the step loop. Raises ValueError if they contradict each other."""

    max_len: int
    """tokens of a sequence, prompt and answer together"""
    max_num_seqs: int = 32
    max_step_tokens: int = 512
    chunk_tokens: int = 512
    """tokens of a step while nearly all sequences decode"""
    attention_tokens: float = math.inf
    """context at which attention costs a token of a prompt as much as all the rest does"""
    max_queue: int = 256
    overlap: bool = True
    prefix_cache: bool = True
    checkpoint_bytes: int | None = None
    """what checkpoints may take of the arena; None: all that nothing else needs"""
    planned_bytes: Mapping[str, int] = field(default_factory=dict)
    """what the memory plan gives each kind of state"""
    flight_bytes: int = 256 << 20
    """state that is on its way out of the arena at a time"""
    checkpoint_tokens: int = 64
    """what a checkpoint must spare at least"""
    vocab: int
    """tokens that the program knows: 0 .. vocab - 1"""
    seed: int | None = None
    """of the seeds of requests that bring none; None: they differ from run to run"""
    processors: bool = False
    """requests may name installed logits processors: slots remember every token for them"""

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} cannot advance max_num_seqs={self.max_num_seqs} sequences;"
                f" the nearest that works is max_step_tokens={self.max_num_seqs}"
            )


class EngineDied(RuntimeError):
    """The program failed, and with it every request; the cause is chained. The engine takes no more steps."""


class _Launched(NamedTuple):
    """A step on the stream."""

    plan: Plan
    event: Event[Samples]


class Engine:
    """Runs requests. One thread calls it; work on the device happens on its stream."""

    def __init__(
        self, *, executor: Executor, backend: Backend, arena: Arena, state: State, settings: EngineSettings,
        buckets: Buckets | None = None, tiers: Callable[[Stream], Tiers | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """``arena`` has a kind for each of the state's (``arena_kinds``), and nothing taken.

        Steps that fit ``buckets`` are captured by ``warm_up``, without which they must not be given. ``tiers`` gives
        where state goes that leaves the arena, for the stream of the steps.
        """
        self._memory = memory = StateMemory(
            arena,
            state,
            max_step_tokens=settings.max_step_tokens,
            prefix_cache=settings.prefix_cache,
            checkpoint_bytes=settings.checkpoint_bytes,
            policy=CheckpointPolicy(page_tokens=state.page_tokens, least_tokens=settings.checkpoint_tokens),
        )
        self._settings = settings
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._max_tokens = memory.longest(settings.max_len)
        self._scheduler = Scheduler(
            memory,
            max_num_seqs=settings.max_num_seqs,
            max_step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.chunk_tokens,
            attention_tokens=settings.attention_tokens,
        )
        self._stepper = Stepper(
            executor=executor,
            backend=backend,
            arena=arena.bytes,
            num_groups=len(state.groups),
            largest=StepShape(settings.max_step_tokens, settings.max_num_seqs, settings.max_num_seqs),
            max_pages=state.full.pages_for(self._max_tokens),
            max_seq_tokens=self._max_tokens,
            buckets=buckets or Buckets(),
            vocab=settings.vocab,
            history=settings.processors,
        )
        # Behind what was launched until now: the contents of weights, arena and slots.
        self._stream = backend.stream(overlap=settings.overlap)
        if (opened := tiers(self._stream)) is not None:
            memory.attach(opened, settings.flight_bytes)
        self._in_flight: deque[_Launched] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[Output] = []
        self._order = 0
        self._dead: Exception | None = None
        self._checked = True
        self._stats = Stats(pages_total=memory.pages_total, finished={}, step_tokens=[0] * (len(STEP_TOKENS) + 1))

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._sequences or self._in_flight or self._outputs or self._memory.busy)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises: RequestError if it can never run, QueueFull if it may be tried again later.
        """
        scheduler, settings = self._scheduler, self._settings
        request = msgspec.structs.replace(request, params=request.params.typed())
        prompt = tokens_of(request.prompt, settings.vocab)
        self._check(request)
        if len(scheduler.waiting) >= settings.max_queue + scheduler.free_slots:
            raise QueueFull(f"{len(scheduler.waiting)} requests wait already; max_queue={settings.max_queue}")
        params, room = request.params, self._max_tokens - len(request.prompt)
        sequence = Sequence(
            request,
            order=self._order,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            arrival_s=request.arrival_s or time.monotonic(),
            prompt=prompt,
        )
        sequence.processors = make_processors(params.logits_processors)
        self._order += 1
        self._sequences[request.id] = sequence
        if request.session is not None and request.session.prefetch:
            scheduler.prefetching.append(sequence)
        else:
            scheduler.add(sequence)
        self._checked = False

    def abort(self, abort: Abort) -> None:
        """End a request; unknown ids are ignored. Its slot and pages are free after the next step.

        The next step gives its last output, without tokens: ``abort``, or ``stop`` where ``keep`` says how many of its
        tokens count. Only those stay in the prefix cache.
        """
        sequence = self._sequences.get(abort.id)
        if sequence is None:
            return
        sequence.cut = True
        if abort.keep is not None:
            del sequence.tokens[sequence.prompt_len + abort.keep :]
        reason: FinishReason = "abort" if abort.keep is None else "stop"
        self._outputs.append(self._report(sequence, [], reason))
        self._finish(sequence, reason)

    def step(self) -> list[Output]:
        """Launch the next step and return what the one before it gave. Raises EngineDied."""
        if self._dead is not None:
            raise EngineDied("the engine died before") from self._dead
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._launch(plan))
        elif moves := self._memory.moves():
            self._stream.submit(self._stepper.copy, moves)
        # One step stays in flight while there is a next one to schedule.
        depth = 1 if plan is not None and self._settings.overlap else 0
        outputs, self._outputs = self._outputs, []
        for sequence in list(self._scheduler.arrived):
            outputs.append(self._report(sequence, [], "length"))
            self._finish(sequence, "length")
        while len(self._in_flight) > depth:
            outputs += self._collect(self._in_flight[0])
        if not self._checked and not self._sequences and not self._in_flight and not self._memory.busy:
            self._heal()
        if plan is None and not outputs:
            self._memory.wait(TRANSFER_WAIT_S)
        return outputs

    def warm_up(self, progress: Callable[[int, int], None] | None = None, *, workspace_bytes: int = 0) -> None:
        """Run the program at its largest and capture it, so that the first request meets a steady state.

        ``workspace_bytes`` of the device are taken for what lives only inside a step. ``progress`` is told (steps
        done, steps in all). Raises what the program raises.
        """
        self._stepper.warm_up(self._stream, progress, workspace_bytes)

    def stats(self) -> Stats:
        """Return gauges and counters, a copy."""
        if not self.has_work:
            # No step does: what stores finish, and pins that end, on an engine that nobody asks anything.
            self._memory.poll()
        scheduler, stats = self._scheduler, self._stats
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting)
        stats.pages_used = scheduler.memory.pages_held
        stats.pages_total = scheduler.memory.pages_total
        stats.prefix_query_tokens = scheduler.query_tokens
        stats.prefix_hit_tokens = scheduler.hit_tokens
        stats.preemptions = scheduler.preemptions
        report(stats, self._memory, self._settings.planned_bytes)
        fields = {name: copy(getattr(stats, name)) for name in stats.__struct_fields__}
        return Stats(**fields)

    def close(self) -> None:
        """End the stream; what is in flight is finished first."""
        if self._memory.tiers is not None:
            self._memory.tiers.close()
        self._stream.close()

    def _check(self, request: Request) -> None:
        params, length = request.params, len(request.prompt)
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id} is running", "id")
        vocab = self._settings.vocab
        params.check(vocab)
        if length >= self._max_tokens:
            raise RequestError(
                f"the prompt has {length} tokens; with 1 token of answer it takes at most {self._max_tokens - 1}",
                "prompt",
            )
        if length + (params.max_tokens or 1) > self._max_tokens:
            raise RequestError(
                f"max_tokens={params.max_tokens} after {length} prompt tokens exceeds the {self._max_tokens} tokens"
                f" that fit; at most {self._max_tokens - length}",
                "max_tokens",
            )
        num_stops = len({*request.eos_ids, *params.stop_token_ids})
        if num_stops > MAX_STOPS:
            raise RequestError(f"{num_stops} tokens would end the answer; at most {MAX_STOPS}", "stop_token_ids")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a request has one answer; request.spread makes {params.n} of it", "n")
        check_choice(request)
        check_cache(request)
        words = request.bad_token_ids
        if any(not 0 <= token < vocab for word in words for token in word) or not all(words):
            raise RequestError(f"bad_words hold a token id outside [0, {vocab}), or none", "bad_words")
        long = [word for word in words if len(word) > 1]
        if len(long) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_TOKENS for word in long):
            raise RequestError(
                f"bad_words takes at most {MAX_BAD_WORDS} words of 2 to {MAX_BAD_TOKENS} tokens", "bad_words"
            )

    def _launch(self, plan: Plan) -> _Launched:
        self._stats.steps += 1
        self._stats.computed_tokens += plan.num_tokens
        self._stats.step_tokens[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        return _Launched(plan, self._stream.submit(self._stepper.run, self._stepper.writer.write(plan)))

    def _collect(self, launched: _Launched) -> list[Output]:
        """Wait for a step; take its tokens in, and give back what it used."""
        try:
            samples = launched.event.wait()
        except Exception as error:
            self._dead = error
            raise EngineDied(f"step failed: {type(error).__name__}: {error}") from error
        self._in_flight.popleft()
        if samples.scored is not None:
            self._take_scores(launched.plan, samples.scored)
        outputs = []
        own = samples.own
        found = itertools.repeat(None) if own is None else own.rows()
        for sequence, token, logprob in zip(launched.plan.sampled, samples.tokens.tolist(), found):
            # A sequence that ended meanwhile was launched once more; that row means nothing.
            if sequence.finish_reason is None:
                outputs.append(self._take(sequence, token, logprob))
        self._scheduler.collected(launched.plan)
        return outputs

    def _take(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
        """Append a token, find out whether it is the last, and return the output."""
        if token < 0:
            output = self._report(sequence, [], "error")
            output.error = _failure(sequence)
            self._finish(sequence, "error")
            return output
        sequence.tokens.append(token)
        self._stats.generation_tokens += 1
        reason: FinishReason | None = None
        if token in sequence.stop_ids:
            reason = "stop"
        elif sequence.num_outputs >= sequence.max_tokens:
            reason = "length"
        output = self._report(sequence, [token], reason)
        if reason == "stop" and token not in sequence.eos_ids:
            output.stop_reason = token
        params = sequence.params
        if params.wants_logprobs and logprob is not None:
            output.logprobs = [_cut(logprob, params.logprobs or 0, len(params.logprob_token_ids or ()))]
        if params.prompt_logprobs is not None and sequence.num_outputs == 1:
            output.prompt_logprobs = sequence.prompt_logprobs
        if reason is not None:
            self._finish(sequence, reason)
        return output

    def _take_scores(self, plan: Plan, scored: Scores) -> None:
        """Append what tokens of prompts scored to the sequences they belong to."""
        rows = iter(scored.rows())
        for chunk in plan.chunks:
            count = chunk.sequence.params.prompt_logprobs or 0
            some = itertools.islice(rows, len(chunk.scored))
            chunk.sequence.prompt_logprobs += [_cut(each, count, 0) for each in some]

    def _report(self, sequence: Sequence, token_ids: list[int], reason: FinishReason | None) -> Output:
        output = Output(
            id=sequence.id, token_ids=token_ids, finish_reason=reason, num_cached_tokens=sequence.num_cached
        )
        if not sequence.reported:
            output.cached_tokens, output.missed_tokens = sequence.cached_tokens, sequence.missed_tokens
        if not sequence.reported and sequence.first_step_s is not None:
            output.queue_s = max(sequence.first_step_s - sequence.arrival_s, 0.0)
            self._stats.prompt_tokens += 0 if sequence.choice else sequence.prompt_len
            sequence.reported = True
        return output

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        del self._sequences[sequence.id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def _heal(self) -> None:
        """Idle: nothing may be held but by the prefix tree. What is held all the same is named and given back."""
        self._checked = True
        for owner, count in self._scheduler.heal().items():
            log.error("request %s leaked %d pages; they are free again", owner, count)


def _failure(sequence: Sequence) -> str:
    """Return why a sequence has no token."""
    processors = sequence.processors
    if processors is None:
        return "the model gave logits that are not finite"
    return processors.failure or f"the model or its logits processors ({processors.names}) gave no finite logits"


def _cut(found: TokenLogprob, count: int, asked: int) -> TokenLogprob:
    """Return of what was found for all rows what one of them wants."""
    found.top_ids, found.top_logprobs = found.top_ids[:count], found.top_logprobs[:count]
    found.asked_logprobs = found.asked_logprobs[:asked]
    return found
