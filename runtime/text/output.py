"""The text side of one answer: what the step loop's tokens add to it. Shared by HTTP and offline use."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.runtime.request import Abort, FinishReason, Output, Request, TokenLogprob
from treadle.runtime.text.detokenizer import Detokenizer, StopStrings
from treadle.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token with its log-probability, readable: ``text`` is ``bytes:\\xf0`` where it is not whole UTF-8."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    rank: int | None
    """1 = most likely; None for a token that was asked for by its id"""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """A chosen token and the likeliest ones in its place, most likely first."""

    chosen: Alternative
    top: tuple[Alternative, ...]
    asked: tuple[Alternative, ...] = ()
    """the tokens of ``logprob_token_ids``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one Output adds to an answer."""

    text: str = ""
    """whole code points, no part of a stop string"""
    token_ids: list[int] = field(default_factory=list)
    """the new tokens that count, the ones of a stop included"""
    logprobs: list[Logprobs] | None = None
    """one per entry of token_ids, if they were asked for"""
    prompt_logprobs: list[Logprobs] | None = None
    """of the prompt's tokens from the second on, once, if they were asked for"""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """the stop string, or the stop token that is not the model's own end"""
    abort: Abort | None = None
    """to be sent to the step loop: a stop string matched and it does not know"""
    error: str | None = None


class OutputProcessor:
    """Turns the Outputs of one request into text, and remembers the answer so far.

    Feed every Output of the request to ``process`` in order. Work is in proportion to the new tokens.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs] | None = None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.cached_tokens: dict[str, int] = {}
        self.missed_tokens: dict[str, int] = {}
        self.queue_s: float | None = None
        self._pieces: list[str] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, request.params.skip_special_tokens)
        self._stops = StopStrings(request.params.stop)

    @property
    def text(self) -> str:
        """The answer so far; all of it once ``finished``."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; Outputs that still come are ignored."""
        return self.finish_reason is not None

    def process(self, output: Output) -> Delta:
        """Return what ``output`` adds. Empty when the answer was finished already."""
        if self.finished:
            return Delta()
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.missed_tokens = output.missed_tokens or self.missed_tokens
        self.queue_s = output.queue_s if output.queue_s is not None else self.queue_s
        text, token_ids, stop = self._take(output)
        logprobs = None
        if output.logprobs is not None:
            logprobs = [self._logprobs(*pair) for pair in zip(token_ids, output.logprobs)]
            self.logprobs += logprobs
            self.cumulative_logprob += sum(entry.chosen.logprob for entry in logprobs)
        if output.prompt_logprobs is not None:
            followers = self.request.prompt[1:]
            self.prompt_logprobs = [self._logprobs(*pair) for pair in zip(followers, output.prompt_logprobs)]
        abort = None
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            if output.finish_reason is None:  # else the step loop ended it by itself and has freed the slot
                abort = Abort(id=self.request.id, keep=len(self.token_ids))
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        if text:
            self._pieces.append(text)
        return Delta(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=None if output.prompt_logprobs is None else self.prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            abort=abort,
            error=self.error,
        )

    def _take(self, output: Output) -> tuple[str, list[int], str | None]:
        """Return the text that became certain, the tokens that count and the stop string that ended them."""
        params, text, taken = self.request.params, [], 0
        # The last token of an answer that ended in "stop" is the one that stopped it.
        stopper = len(output.token_ids) - 1 if output.finish_reason == "stop" else None
        for i, token_id in enumerate(output.token_ids):
            taken += 1
            self.token_ids.append(token_id)
            if not params.detokenize or (i == stopper and not params.include_stop_str_in_output):
                continue
            piece = self._detokenizer.feed(token_id)
            if not piece:
                continue
            certain, match = self._stops.feed(piece, may_stop=len(self.token_ids) >= params.min_tokens)
            text.append(certain)
            if match is not None:
                if params.include_stop_str_in_output:
                    text.append(match.stop)
                return "".join(text), output.token_ids[:taken], match.stop
        if output.finish_reason is not None:
            text.append(self._stops.flush())
        return "".join(text), output.token_ids[:taken], None

    def _logprobs(self, token_id: int, found: TokenLogprob) -> Logprobs:
        top = tuple(
            self._alternative(other, logprob, rank)
            for rank, (other, logprob) in enumerate(zip(found.top_ids, found.top_logprobs), start=1)
        )
        asked = tuple(
            self._alternative(other, logprob, None)
            for other, logprob in zip(self.request.params.logprob_token_ids or (), found.asked_logprobs)
        )
        return Logprobs(self._alternative(token_id, found.logprob, found.rank), top, asked)

    def _alternative(self, token_id: int, logprob: float, rank: int | None) -> Alternative:
        raw = self._tokenizer.token_bytes(token_id)
        return Alternative(token_id, self._tokenizer.token_text(token_id), raw, logprob, rank)
