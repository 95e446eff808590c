"""What offline generation returns. Names and shapes are those of vLLM, so that a script ports by its import."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.runtime.text.output import Alternative, Logprobs, OutputProcessor


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one place."""

    logprob: float
    rank: int
    """1 = most likely"""
    decoded_token: str
    r"""its text; ``bytes:\xf0\x9f`` where a token is not whole UTF-8"""


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    """the token or the stop string that ended it included"""
    cumulative_logprob: float | None
    """sum over token_ids; None if no log-probabilities were asked for"""
    logprobs: list[dict[int, Logprob]] | None
    """for each of token_ids: token id -> log-probability, of the chosen and of the likeliest tokens"""
    finish_reason: str | None
    stop_reason: int | str | None
    """the stop string or stop token; None at the model's own end"""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When a request passed its stages: seconds on the clock of time.monotonic."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None
    """seconds"""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if it came as token ids"""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """prompt tokens that came from the prefix cache"""
    metrics: RequestMetrics


def request_output(answer: OutputProcessor, prompt: str | None, metrics: RequestMetrics) -> RequestOutput:
    """Return ``answer`` in vLLM's shape."""
    asked = answer.request.params.logprobs is not None
    completion = CompletionOutput(
        index=0,
        text=answer.text,
        token_ids=answer.token_ids,
        cumulative_logprob=answer.cumulative_logprob if asked else None,
        logprobs=[_by_token(entry) for entry in answer.logprobs] if asked else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )
    return RequestOutput(
        request_id=answer.request.id,
        prompt=prompt,
        prompt_token_ids=answer.request.prompt,
        outputs=[completion],
        finished=answer.finished,
        num_cached_tokens=answer.num_cached_tokens,
        metrics=metrics,
    )


def _by_token(entry: Logprobs) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for token in (entry.chosen, *entry.top):
        found.setdefault(token.token_id, _logprob(token))
    return found


def _logprob(token: Alternative) -> Logprob:
    return Logprob(token.logprob, token.rank, token.text)
