"""What offline generation returns. Names and shapes are those of vLLM, so that a script ports by its import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.runtime.text.output import Alternative, Logprobs, OutputProcessor


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one place."""

    logprob: float
    rank: int | None
    """1 = most likely; None for a token that was asked for by its id"""
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

    def finished(self) -> bool:
        """Return whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When a request passed its stages: seconds on the clock of time.monotonic."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None
    """seconds"""

    @staticmethod
    def over(answers: Sequence[RequestMetrics]) -> RequestMetrics:
        """Return those of a prompt, of which ``answers`` are: until the first token of any, and the last of all."""
        first = [each.first_token_time for each in answers if each.first_token_time is not None]
        last = [each.finished_time for each in answers if each.finished_time is not None]
        queued = [each.time_in_queue for each in answers if each.time_in_queue is not None]
        return RequestMetrics(
            arrival_time=answers[0].arrival_time,
            first_token_time=min(first, default=None),
            finished_time=max(last, default=None),
            time_in_queue=min(queued, default=None),
        )


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if it came as token ids"""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """for each of prompt_token_ids, of the token and of the likeliest in its place; None for the first"""
    outputs: list[CompletionOutput]
    """``n`` of them"""
    finished: bool
    num_cached_tokens: int
    """prompt tokens that came from the prefix cache"""
    cached_tokens: dict[str, int]
    """where those were: ``device``, or the name of a tier"""
    missed_tokens: dict[str, int]
    """why the prompt's other tokens did not come from there: cold, evicted, below_granularity, salt, opted_out"""
    metrics: RequestMetrics


def request_output(
    name: str, prompt: str | None, answers: Sequence[OutputProcessor], metrics: RequestMetrics
) -> RequestOutput:
    """Return the answers to one prompt in vLLM's shape."""
    first = answers[0]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if first.prompt_logprobs is not None:
        prompt_logprobs = [None, *map(_by_token, first.prompt_logprobs)]
    return RequestOutput(
        request_id=name,
        prompt=prompt,
        prompt_token_ids=first.request.prompt,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(index, answer) for index, answer in enumerate(answers)],
        finished=all(answer.finished for answer in answers),
        num_cached_tokens=first.num_cached_tokens,
        cached_tokens=first.cached_tokens,
        missed_tokens=first.missed_tokens,
        metrics=metrics,
    )


def _completion(index: int, answer: OutputProcessor) -> CompletionOutput:
    asked = answer.request.params.wants_logprobs
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=answer.token_ids,
        cumulative_logprob=answer.cumulative_logprob if asked else None,
        logprobs=[_by_token(entry) for entry in answer.logprobs] if asked else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def _by_token(entry: Logprobs) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for token in (entry.chosen, *entry.top, *entry.asked):
        found.setdefault(token.token_id, _logprob(token))
    return found


def _logprob(token: Alternative) -> Logprob:
    return Logprob(token.logprob, token.rank, token.text)
