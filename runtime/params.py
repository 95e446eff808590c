"""How the tokens of one request are chosen and when it ends. Names and defaults are those of vLLM's SamplingParams."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
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
LEAST = math.ulp(0.0)
"""the limit of what must be more than 0"""
MAX_BIAS = 1000
"""a larger one forbids or forces a token, which others do better"""
PROCESSORS_TAKE = "names of installed processors with their arguments: {'name': {}}"


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
        given = {}
        for name, value in keywords.items():
            if name in _TYPES:
                # None is what leaving out is, but for max_tokens.
                if value is not None or name == "max_tokens":
                    given[name] = value
            elif not asks_nothing(name, value, NEUTRAL_PARAMS):
                raise _refusal(name, value)
        return super().__call__(**given)


class SamplingParams(msgspec.Struct, metaclass=ParamsMeta, kw_only=True):
    """Parameters of one request. Raises RequestError that names the field, its value and what it takes.

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
            force_setattr(self, "logit_bias", dict(map(_bias, self.logit_bias.items())) or None)
        if self.logits_processors is not None:
            force_setattr(self, "logits_processors", _processors(self.logits_processors) or None)
        for name, (kinds, item, _) in _TYPES.items():
            value = getattr(self, name)
            if type(value) not in kinds:
                force_setattr(self, name, _number(name, value, kinds))
            elif item is not None and value and not {*map(type, value)} <= {item}:
                wrong = next(each for each in value if type(each) is not item)
                raise _mistyped(name, f"{name} holds {reprlib.repr(wrong)}", wrong)
        self._check_ranges()
        self._check_counts()

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities come with every token of the answer."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def typed(self) -> SamplingParams:
        """Return a copy, checked as at construction: fields may have been set since, and in any form.

        Raises: RequestError naming the field.
        """
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})

    def check(self, vocab: int) -> None:
        """Raise RequestError if a value is beyond a model of ``vocab`` tokens."""
        if self.top_k > vocab:
            raise RequestError(f"top_k={self.top_k} is outside [-1, {vocab}]", "top_k")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            outside = next((i for i in getattr(self, name) or () if not 0 <= i < vocab), None)
            if outside is not None:
                raise RequestError(f"{name} holds {outside}, outside [0, {vocab})", name)

    def _check_ranges(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                problem = "is too few; it takes at least" if high == math.inf else "is outside"
                raise RequestError(f"{name}={reprlib.repr(value)} {problem} {_span(name)}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", "min_tokens")
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            raise RequestError(f"truncate_prompt_tokens={keep} is neither -1 nor at least 1", "truncate_prompt_tokens")

    def _check_counts(self) -> None:
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, none of them empty", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True; stop_token_ids works without text", "stop")
        if not all(map(str.strip, self.bad_words)):
            raise RequestError("bad_words takes words; one of them is empty", "bad_words")
        for name in ("logprob_token_ids", "allowed_token_ids"):
            if getattr(self, name) == ():
                raise RequestError(f"{name} is empty; leave it out, or give at least one token id", name)
        for name, most in _COUNTS.items():
            if (count := len(getattr(self, name) or ())) > most:
                raise RequestError(f"{name} has {count} entries; it takes at most {most}", name)


Kinds = tuple[type, ...]

_NONE = type(None)
_FORMS: dict[str, tuple[Kinds, type | None, str]] = {
    "int": ((int,), None, "a whole number"),
    "int | None": ((int, _NONE), None, "a whole number"),
    "float": ((float,), None, "a number"),
    "bool": ((bool,), None, "True or False"),
    "tuple[str, ...]": ((tuple,), str, "texts"),
    "tuple[int, ...]": ((tuple,), int, "token ids"),
    "tuple[int, ...] | None": ((tuple, _NONE), int, "token ids"),
    "dict[int, float] | None": ((dict, _NONE), int, "a number for each token id"),
    "dict[str, dict[str, Any]] | None": ((dict, _NONE), str, PROCESSORS_TAKE),
}
_TYPES = {name: _FORMS[declared] for name, declared in SamplingParams.__annotations__.items()}
"""by field: types of a value once it is in its form, the type of what it holds, and what it takes in words"""

_LIMITS: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "max_tokens": (1, math.inf),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    # A smaller one would make logits infinite.
    "repetition_penalty": (MIN_REPETITION, 100),
    "temperature": (0, 100),
    "top_k": (-1, math.inf),
    "top_p": (LEAST, 1),
    "min_p": (0, 1),
    "min_tokens": (0, math.inf),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**63 - 1),
}
_COUNTS = {"stop_token_ids": MAX_STOP_TOKENS, "logprob_token_ids": MAX_ASKED, "logit_bias": MAX_BIASES}


def _refusal(name: str, value: object) -> RequestError:
    if name in NEUTRAL_PARAMS:
        takes = " or ".join(map(repr, NEUTRAL_PARAMS[name] or (None,)))
        return RequestError(f"{name}={value!r} is not supported yet; {name} takes {takes}", name)
    close = nearest(name, [*_TYPES, *NEUTRAL_PARAMS])
    hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(_TYPES)}"
    return RequestError(f"{name} is not a sampling parameter{hint}", name)


def _span(name: str) -> str:
    low, high = _LIMITS[name]
    left = "(0" if low == LEAST else f"[{low}"
    return f"{low}" if high == math.inf else f"{left}, {high}]"


def _number(name: str, value: object, kinds: Kinds) -> float:
    """Return a number for a field of floats as one. Raises RequestError for all else."""
    if float in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise _mistyped(name, f"{name}={reprlib.repr(value)}", value)


def _mistyped(name: str, found: str, value: object) -> RequestError:
    limits = f" in {_span(name)}" if _LIMITS.get(name, (0, math.inf))[1] < math.inf else ""
    return RequestError(f"{found}, of type {type(value).__name__}: it takes {_TYPES[name][2]}{limits}", name)


def _bias(entry: tuple[object, object]) -> tuple[object, float]:
    token_id, bias = _whole(entry[0]), entry[1]
    if type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:  # type: ignore[arg-type]
        raise RequestError(
            f"logit_bias[{token_id}]={reprlib.repr(bias)} is no number in [{-MAX_BIAS}, {MAX_BIAS}];"
            " allowed_token_ids and bad_words forbid tokens",
            "logit_bias",
        )
    return token_id, float(bias)  # type: ignore[arg-type]


def _processors(given: object) -> dict[str, dict[str, Any]]:
    """Return processors with their arguments. Raises RequestError for what is none, or cannot be sent on."""
    if isinstance(given, list | tuple) and all(isinstance(name, str) for name in given):
        given = dict.fromkeys(given)
    if not isinstance(given, Mapping) or not all(each is None or isinstance(each, Mapping) for each in given.values()):
        raise RequestError(
            f"logits_processors takes {PROCESSORS_TAKE};"
            " a function is installed as an entry point of treadle.logits_processors",
            "logits_processors",
        )
    try:
        # Arguments are of any type, as long as they can be sent to the engine process.
        msgspec.msgpack.encode(given)
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise RequestError(f"logits_processors: {error}", "logits_processors") from error
    return {name: dict(each or {}) for name, each in given.items()}


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
