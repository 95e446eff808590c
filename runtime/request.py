"""What crosses between the text side (HTTP, tokenizer) and the step loop. Plain msgspec structs, no torch.

Names and defaults are those of the OpenAI API and of vLLM's SamplingParams, so that a script ports by its import.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec.structs import force_setattr

from treadle.conf.errors import nearest
from treadle.runtime.keywords import NEUTRAL_PARAMS, asks_nothing

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that cannot be served: which field, its value and the limit. It never disturbs another request."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ParamsMeta(msgspec.StructMeta):
    """How SamplingParams are made by hand: also with vLLM's other parameters, as long as they ask for nothing."""

    def __call__(cls, *values: Any, **keywords: Any) -> Any:
        """Return the parameters. Raises RequestError for a name that is none, or a value that is not supported."""
        if values:
            raise RequestError("sampling parameters are given by name: SamplingParams(temperature=0.8)")
        given = {name: value for name, value in keywords.items() if not asks_nothing(name, value, NEUTRAL_PARAMS)}
        for name, value in given.items():
            if name in NEUTRAL_PARAMS:
                takes = " or ".join(map(repr, NEUTRAL_PARAMS[name] or (None,)))
                raise RequestError(f"{name}={value!r} is not supported yet; {name} takes {takes}", name)
            if name not in cls.__struct_fields__:
                close = nearest(name, [*cls.__struct_fields__, *NEUTRAL_PARAMS])
                hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(cls.__struct_fields__)}"
                raise RequestError(f"{name} is not a sampling parameter{hint}", name)
        return super().__call__(**given)


class SamplingParams(msgspec.Struct, metaclass=ParamsMeta, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends. Raises RequestError (field named) from ``check``."""

    temperature: float = 1.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k most likely; 0 and -1 keep all"""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """the uniform numbers depend on seed and token index alone, so the text is the same as long as the logits are;
    kernels may round differently in another batch, and there is no deterministic mode yet"""
    stop: tuple[str, ...] = ()
    """strings that end the text; held back until they cannot match, never part of it unless asked"""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context holds"""
    min_tokens: int = 0
    logprobs: int | None = None
    """None: none; n: the chosen token's and the n most likely ones'"""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Scripts pass one stop string, or lists; what is kept is immutable.
        stop: object = self.stop
        if isinstance(stop, str) or stop is None:
            force_setattr(self, "stop", (stop,) if isinstance(stop, str) else ())
        elif isinstance(stop, list):
            force_setattr(self, "stop", tuple(stop))
        ids: object = self.stop_token_ids
        if isinstance(ids, list) or ids is None:
            force_setattr(self, "stop_token_ids", tuple(ids or ()))

    def typed(self) -> SamplingParams:
        """Return these with every field of its declared type, which constructors do not check: 0 becomes 0.0.

        Raises: RequestError naming the field.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), SamplingParams)
        except (msgspec.ValidationError, TypeError, OverflowError) as error:
            # msgspec ends its message with the path: ... - at `$.top_k`
            path = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0]
            raise RequestError(f"sampling parameter {path}: {error}", path or None) from error

    def check(self, vocab: int) -> None:
        """Raise RequestError if a value is outside its range."""
        limits: list[tuple[str, float, float, float | None]] = [
            ("max_tokens", self.max_tokens if self.max_tokens is not None else 1, 1, None),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, -1, vocab),
            ("min_p", self.min_p, 0.0, 1.0),
            ("min_tokens", self.min_tokens, 0, None),
            ("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            ("seed", self.seed or 0, -(2**63), 2**63 - 1),
        ]
        for name, value, low, high in limits:
            if high is None and not low <= value:
                raise RequestError(f"{name}={value} is too few; it takes at least {low}", name)
            if high is not None and not low <= value <= high:  # also refuses NaN
                raise RequestError(f"{name}={value} is outside [{_spell(low)}, {_spell(high)}]", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", "min_tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p} is outside (0, 1]", "top_p")
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, none of them empty", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS or any(not 0 <= i < vocab for i in self.stop_token_ids):
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids in [0, {vocab})", "stop_token_ids")


def _spell(limit: float) -> str:
    """Return a limit as it is written: whole numbers whole, however large."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_TOKENS = 16


class Request(msgspec.Struct, kw_only=True, tag=True):
    """One prompt for the step loop, already token ids."""

    id: str
    prompt: list[int]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    """seconds on the clock of time.monotonic, for queue time"""


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


class Output(msgspec.Struct, kw_only=True, tag=True):
    """New tokens of one request after a step; the last one carries ``finish_reason``."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
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
    preemptions: int = 0
    steps: int = 0
    step_tokens: list[int] = []
    """steps of at most STEP_TOKENS[i] tokens and more than the bound before; one more for those beyond all"""
    finished: dict[str, int] = {}
    """finish reason -> requests"""
