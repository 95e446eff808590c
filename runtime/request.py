"""What crosses between the text side (HTTP, tokenizer) and the step loop. Plain msgspec structs, no torch."""

from __future__ import annotations

import reprlib
from typing import Literal

import msgspec

from treadle.runtime.params import MAX_LOGPROBS as MAX_LOGPROBS
from treadle.runtime.params import RequestError as RequestError
from treadle.runtime.params import SamplingParams as SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

MISS_REASONS = ("cold", "evicted", "below_granularity", "salt", "opted_out", "failed")
"""why a token of a prompt was computed although the prefix cache is on: it was not known; it was, until its memory
was needed; it is behind the last place that the cache can go on from; it is known under another salt; its request
wants values that only computing gives; a tier did not give it"""

PREEMPTED = ("kept", "moved", "recomputed")
"""what became of the state of a request that was put back in the queue: it stayed on the device as long as there was
room, went to a tier, or was lost"""

RECOMPUTE_CAUSES = ("evicted", "failed")
"""why tokens of preempted requests were computed again: there was no room for their state anywhere, or a tier did not
give it back"""

HINTS = ("pin", "demote", "prefetch")

MAX_SALT = 512
"""characters of a salt, or of a session's name"""
MAX_PIN_S = 3600.0


class QueueFull(RuntimeError):
    """The bounded queue takes no more requests now (HTTP 429); says its length."""


class SessionHint(msgspec.Struct, kw_only=True, frozen=True):
    """What a client knows about the next turn of its session. Hints: they change when an answer comes, never what.

    A session's latest request speaks for it. Raises RequestError (field named) for opposites, and for what is no hint.
    """

    id: str
    pin_s: float = 0.0
    """seconds after the answer's end for which its state is to stay on the device"""
    demote: bool = False
    """after the answer's end its state may leave the device at once"""
    prefetch: bool = False
    """bring the state of the prompt to the device and generate nothing"""

    def __post_init__(self) -> None:
        if type(self.id) is not str or not 1 <= len(self.id) <= MAX_SALT:
            raise RequestError(f"id={reprlib.repr(self.id)} is not a text of 1 to {MAX_SALT} characters", "id")
        if type(self.pin_s) not in (int, float) or not 0 <= self.pin_s <= MAX_PIN_S:
            raise RequestError(f"pin_s={reprlib.repr(self.pin_s)} is not a number in [0, {MAX_PIN_S:g}]", "pin_s")
        for name in ("demote", "prefetch"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name}={reprlib.repr(getattr(self, name))} is not True or False", name)
        if self.demote and (self.pin_s or self.prefetch):
            other = "pin_s" if self.pin_s else "prefetch"
            raise RequestError(f"demote gives up what {other} asks for; leave one out", "demote")


class Request(msgspec.Struct, kw_only=True, tag=True):
    """One prompt for the step loop, already token ids."""

    id: str
    prompt: list[int]
    params: SamplingParams
    """``n`` is 1 here: more answers are as many requests of one group"""
    eos_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """the bad words as tokens"""
    group: str | None = None
    """requests of one group have the same prompt; as far as there is room for them, it is computed once"""
    choice: int = 0
    """which of its group's answers this is; the prompt counts in the first"""
    cache_salt: str | None = None
    """only requests with the same salt share prefixes"""
    boundaries: tuple[int, ...] = ()
    """where messages of the prompt end, in tokens: others may part from it there"""
    arrival_s: float = 0.0
    """seconds on the clock of time.monotonic, for queue time"""
    session: SessionHint | None = None


def spread(request: Request) -> list[Request]:
    """Return a request for each of the ``n`` answers that ``request`` asks for: one group, ids ``ID-0``, ``ID-1``."""
    params = request.params
    if params.n == 1:
        return [request]
    replace = msgspec.structs.replace
    requests = []
    for choice in range(params.n):
        seed = None if params.seed is None else (params.seed + choice + 2**63) % 2**64 - 2**63
        alone = replace(params, n=1, seed=seed, prompt_logprobs=None if choice else params.prompt_logprobs)
        name = f"{request.id}-{choice}"
        requests.append(replace(request, id=name, params=alone, group=request.id, choice=choice))
    return requests


def check_choice(request: Request) -> None:
    """Raise RequestError if no token is left to choose, or none before ``min_tokens`` are there."""
    params = request.params
    if params.allowed_token_ids is None:
        return
    left = {*params.allowed_token_ids} - {word[0] for word in request.bad_token_ids if len(word) == 1}
    if not left:
        raise RequestError("allowed_token_ids leaves no token that bad_words do not forbid", "allowed_token_ids")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_ids)}
    if params.min_tokens and left <= ends:
        raise RequestError(
            "allowed_token_ids holds only tokens that end the answer, which min_tokens forbids;"
            " add another one, or leave min_tokens out",
            "allowed_token_ids",
        )


def check_cache(request: Request) -> None:
    """Raise RequestError if the salt or the hints of a request are none, or leave no place for its parameters."""
    salt, session = request.cache_salt, request.session
    if salt is not None and (not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT):
        raise RequestError(f"cache_salt takes a text of 1 to {MAX_SALT} characters", "cache_salt")
    if session is None:
        return
    if not isinstance(session, SessionHint):
        raise RequestError(f"session={reprlib.repr(session)} is no SessionHint", "session")
    if session.prefetch and (request.params.n != 1 or request.params.prompt_logprobs is not None):
        field = "n" if request.params.n != 1 else "prompt_logprobs"
        raise RequestError(f"prefetch computes nothing, so {field} has nothing to show", field)


class Abort(msgspec.Struct, kw_only=True, tag=True):
    """End a request now: the client left, or a stop string matched (then ``keep`` tokens count as its output)."""

    id: str
    keep: int | None = None


class TokenLogprob(msgspec.Struct, array_like=True):
    """The log-probability of a chosen token and the likeliest alternatives, most likely first."""

    logprob: float
    rank: int
    """1 = most likely"""
    top_ids: list[int]
    top_logprobs: list[float]
    asked_logprobs: list[float] = []
    """those of ``logprob_token_ids``, in their order"""


class Output(msgspec.Struct, kw_only=True, tag=True):
    """New tokens of one request after a step; the last one carries ``finish_reason``."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """of the prompt's tokens from the second on, on the first output, if they were asked for"""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """the token id that stopped it, when it was not the model's end of sequence"""
    error: str | None = None
    refused: bool = False
    """the error is the request's own fault"""
    num_cached_tokens: int = 0
    """prompt tokens that came from the prefix cache"""
    cached_tokens: dict[str, int] = {}
    """where those were: ``device``, or the name of a tier; on the first output"""
    missed_tokens: dict[str, int] = {}
    """why the prompt's other tokens did not come from there (MISS_REASONS); on the first output"""
    queue_s: float | None = None
    """seconds between arrival and the first step, on the first output"""


STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""bounds of the buckets in which Stats counts steps by their tokens"""


class KindStats(msgspec.Struct, kw_only=True):
    """Bytes of one kind of state on the device."""

    item_bytes: int = 0
    """of one page or block"""
    planned_bytes: int = 0
    """what the memory plan set aside for it; kinds lend each other what they do not use"""
    used_bytes: int = 0
    """held by requests"""
    cached_bytes: int = 0
    """held for later requests alone, and given away when memory is needed"""
    free_bytes: int = 0
    """of its slabs that nobody holds"""
    available_bytes: int = 0
    """what it could be given in all"""


class Metric(msgspec.Struct, array_like=True):
    """A number for monitoring."""

    name: str
    """without a prefix"""
    doc: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: dict[str, str] = {}


class Stats(msgspec.Struct, kw_only=True, tag=True):
    """Gauges and counters of the step loop; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    """tokens fed to the program, prompts and decodes"""
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_missed_tokens: dict[str, int] = {}
    """reason -> tokens of prompts that were computed"""
    recomputed_tokens: dict[str, int] = {}
    """cause -> tokens that were computed again after a preemption"""
    preemptions: int = 0
    steps: int = 0
    step_tokens: list[int] = []
    """steps of at most STEP_TOKENS[i] tokens and more than the bound before; one more for those beyond all"""
    finished: dict[str, int] = {}
    """finish reason -> requests"""
    external_query_tokens: int = 0
    """prompt tokens that were not on the device and were looked for in the tiers"""
    external_hit_tokens: int = 0
    """those of them that came from there"""
    preempted: dict[str, int] = {}
    """preemptions by what became of the state (PREEMPTED)"""
    state_kinds: dict[str, KindStats] = {}
    arena_bytes: int = 0
    """of the device, for state of every kind"""
    free_slab_bytes: int = 0
    """of the arena that no kind has"""
    stranded_bytes: int = 0
    """unused bytes that no request of any kind can be given"""
    evacuated_bytes: int = 0
    """moved on the device, since the start, so that another kind could have their slab"""
    fragmentation: float = 0.0
    """share of the unused bytes that only evacuation makes another kind's"""
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    """of the device that checkpoints hold"""
    sessions_pinned: int = 0
    pinned_bytes: int = 0
    """of the device that pinned sessions hold"""
    session_hints: dict[str, int] = {}
    """hints that were followed (HINTS)"""
    tiers: list[Metric] = []
    """what the tiers below the device count"""
