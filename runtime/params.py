"""How the tokens of one request are chosen and when it ends. Names and defaults are those of vLLM's SamplingParams."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from treadle.conf.errors import nearest
from treadle.graph.packet import MAX_ASKED, MAX_BIASES
from treadle.runtime.keywords import NEUTRAL_PARAMS, asks_nothing

MAX_N = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_TOKENS = 16
MIN_REPETITION = 0.01
MAX_BIAS = 1000
"""a larger one forbids or forces a token, which others do better"""


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
        given = {
            name: value
            for name, value in keywords.items()
            # None is what leaving out is, but for max_tokens.
            if not asks_nothing(name, value, NEUTRAL_PARAMS)
            and (value is not None or name == "max_tokens" or name not in cls.__struct_fields__)
        }
        for name, value in given.items():
            if name in NEUTRAL_PARAMS:
                takes = " or ".join(map(repr, NEUTRAL_PARAMS[name] or (None,)))
                raise RequestError(f"{name}={value!r} is not supported yet; {name} takes {takes}", name)
            if name not in cls.__struct_fields__:
                close = nearest(name, [*cls.__struct_fields__, *NEUTRAL_PARAMS])
                hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(cls.__struct_fields__)}"
                raise RequestError(f"{name} is not a sampling parameter{hint}", name)
        return super().__call__(**given)


class SamplingParams(msgspec.Struct, metaclass=ParamsMeta, kw_only=True):
    """Parameters of one request. Raises RequestError (field named) from ``check``.

    Scripts may set fields until they hand them over: a request has its own, which never change.
    """

    n: int = 1
    """answers to one prompt, which is computed once; the i-th draws by ``seed + i``"""
    presence_penalty: float = 0.0
    """taken off the logit of every token that the answer holds already"""
    frequency_penalty: float = 0.0
    """the same for each time that the answer holds it"""
    repetition_penalty: float = 1.0
    """positive logits of tokens in prompt or answer are divided by it, negative ones multiplied"""
    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    top_k: int = 0
    """keep the k most likely; 0 and -1 keep all"""
    min_p: float = 0.0
    seed: int | None = None
    """the uniform numbers depend on seed and token index alone, so the text is the same as long as the logits are;
    kernels may round differently in another batch, unless ``passes.deterministic`` forbids them to"""
    stop: tuple[str, ...] = ()
    """strings that end the text; held back until they cannot match, never part of it unless asked"""
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    """texts that the answer must not hold; a word of several tokens loses its last one where it would complete it"""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context holds"""
    min_tokens: int = 0
    """before so many are generated, nothing ends the answer"""
    logprobs: int | None = None
    """None: none; n: the chosen token's and the n most likely ones', as the model gave them"""
    prompt_logprobs: int | None = None
    """the same for every token of the prompt after the first"""
    logprob_token_ids: tuple[int, ...] | None = None
    """tokens whose log-probabilities are given at every place of the answer, beside the chosen token's"""
    detokenize: bool = True
    """False: no text, so no stop strings"""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """changes nothing: a text is the joined bytes of its tokens, and none are put between"""
    logit_bias: dict[int, float] | None = None
    """added to the logits of these tokens"""
    allowed_token_ids: tuple[int, ...] | None = None
    """no other token is drawn"""
    truncate_prompt_tokens: int | None = None
    """keep only so many of the prompt's last tokens; -1: as many as the context holds beside the answer"""
    skip_reading_prefix_cache: bool = False
    """compute the whole prompt; others may still go on from it"""
    logits_processors: dict[str, dict[str, Any]] | None = None
    """installed processors by name (entry points of ``treadle.logits_processors``), each with its arguments"""

    def __post_init__(self) -> None:
        # Scripts pass one stop string, lists, sets; JSON has only strings as keys.
        for name in ("stop", "stop_token_ids", "bad_words"):
            given: object = getattr(self, name)
            if isinstance(given, str) or given is None:
                force_setattr(self, name, (given,) if isinstance(given, str) else ())
            elif isinstance(given, list | set | frozenset):
                force_setattr(self, name, tuple(given))
        for name in ("logprob_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if isinstance(given, list | set | frozenset | range):
                force_setattr(self, name, tuple(given))
        if isinstance(self.logit_bias, Mapping):
            force_setattr(self, "logit_bias", {_whole(key): value for key, value in self.logit_bias.items()} or None)
        processors: object = self.logits_processors
        if isinstance(processors, list | tuple) and all(isinstance(name, str) for name in processors):
            processors = dict.fromkeys(processors)
        if isinstance(processors, Mapping):
            force_setattr(self, "logits_processors", {name: each or {} for name, each in processors.items()} or None)
        elif not processors:
            force_setattr(self, "logits_processors", None)
        else:
            raise RequestError(
                "logits_processors takes names of installed processors with their arguments: {'name': {}};"
                " a function is installed as an entry point of treadle.logits_processors",
                "logits_processors",
            )

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities come with every token of the answer."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def typed(self) -> SamplingParams:
        """Return these with every field of its declared type, which constructors do not check: 0 becomes 0.0.

        Raises: RequestError naming the field.
        """
        # Made anew, since fields may have been set in any of the forms that the constructor takes.
        given = SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})
        try:
            # Arguments of processors are of any type, as long as they can be sent to the engine process.
            msgspec.msgpack.encode(given.logits_processors)
        except (TypeError, OverflowError, RecursionError, ValueError) as error:
            raise RequestError(f"logits_processors: {error}", "logits_processors") from error
        try:
            return msgspec.convert(msgspec.to_builtins(given), SamplingParams)
        except (msgspec.ValidationError, TypeError, OverflowError) as error:
            # msgspec ends its message with the path: ... - at `$.top_k`, `$.stop[0]` or `key in `$.logit_bias`
            path = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0] if "`$." in str(error) else ""
            raise RequestError(f"sampling parameter{path and f' {path}'}: {error}", path or None) from error

    def check(self, vocab: int) -> None:
        """Raise RequestError if a value is outside its range."""
        limits: list[tuple[str, float, float, float | None]] = [
            ("n", self.n, 1, MAX_N),
            ("max_tokens", self.max_tokens if self.max_tokens is not None else 1, 1, None),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, -1, vocab),
            ("min_p", self.min_p, 0.0, 1.0),
            ("min_tokens", self.min_tokens, 0, None),
            ("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS),
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
        if not MIN_REPETITION <= self.repetition_penalty <= 100.0:  # a smaller one would make logits infinite
            value = self.repetition_penalty
            span = f"[{MIN_REPETITION}, 100]"
            raise RequestError(f"repetition_penalty={value} is outside {span}; 1 changes nothing", "repetition_penalty")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens not in range(-1, 2**31):
            value = self.truncate_prompt_tokens
            raise RequestError(f"truncate_prompt_tokens={value} is neither -1 nor at least 1", "truncate_prompt_tokens")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 leaves no prompt; it takes at least 1", "truncate_prompt_tokens"
            )
        self._check_stops(vocab)
        self._check_tokens(vocab)

    def _check_stops(self, vocab: int) -> None:
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, none of them empty", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True; stop_token_ids works without text", "stop")
        if any(not word.strip() for word in self.bad_words):
            raise RequestError("bad_words takes words; one of them is empty", "bad_words")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS or any(not 0 <= i < vocab for i in self.stop_token_ids):
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids in [0, {vocab})", "stop_token_ids")

    def _check_tokens(self, vocab: int) -> None:
        if self.logprob_token_ids is not None:
            _check_ids("logprob_token_ids", self.logprob_token_ids, vocab, MAX_ASKED)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab, None)
        for token_id, bias in (self.logit_bias or {}).items():
            if not 0 <= token_id < vocab:
                raise RequestError(f"logit_bias names token {token_id}, outside [0, {vocab})", "logit_bias")
            if not abs(bias) <= MAX_BIAS:
                raise RequestError(
                    f"logit_bias[{token_id}]={bias} is outside [{-MAX_BIAS}, {MAX_BIAS}];"
                    " allowed_token_ids and bad_words forbid tokens",
                    "logit_bias",
                )
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias or ())} entries; it takes at most {MAX_BIASES}", "logit_bias"
            )


def _check_ids(name: str, ids: tuple[int, ...], vocab: int, most: int | None) -> None:
    if not ids:
        raise RequestError(f"{name} is empty; leave it out, or give at least one token id", name)
    if most is not None and len(ids) > most:
        raise RequestError(f"{name} has {len(ids)} ids; it takes at most {most}", name)
    outside = next((i for i in ids if not 0 <= i < vocab), None)
    if outside is not None:
        raise RequestError(f"{name} holds {outside}, outside [0, {vocab})", name)


def _whole(key: object) -> object:
    """Return a key of JSON as the number that it spells, and others as they are."""
    try:
        number = int(key) if isinstance(key, str) else key
    except ValueError:
        number = None
    # Only one spelling, so that no two keys mean one token.
    if isinstance(key, str) and str(number) != key:
        raise RequestError(f"logit_bias names token {reprlib.repr(key)}, which is no token id", "logit_bias")
    return number


def _spell(limit: float) -> str:
    """Return a limit as it is written: whole numbers whole, however large."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
