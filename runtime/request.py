"""What crosses between the text side (HTTP, tokenizer) and the step loop. Plain msgspec structs, no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from treadle.runtime.params import MAX_LOGPROBS as MAX_LOGPROBS
from treadle.runtime.params import RequestError as RequestError
from treadle.runtime.params import SamplingParams as SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


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
    queue_s: float | None = None
    """seconds between arrival and the first step, on the first output"""


STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""bounds of the buckets in which Stats counts steps by their tokens"""


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
