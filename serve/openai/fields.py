"""What both generation endpoints accept: sampling fields, hints that change nothing, and fields refused by name.

Nothing is ignored in silence: a field is honoured, or known to be without effect here, or the answer is a 400.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict, Field

from treadle.runtime.request import SamplingParams
from treadle.serve.errors import ApiError, clip

HINTS = frozenset(
    ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
)
"""OpenAI's fields about billing, storage and caching: accepted, they change no token"""


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(BaseModel):
    """Fields of both /v1/completions and /v1/chat/completions."""

    # Unknown fields are for `refuse_unknown`, which stops at the first one and names the nearest known one.
    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
    }
    """fields that are not supported, with the values (beside null) that ask for nothing"""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def refuse_unknown(cls, fields: Mapping[str, Any]) -> None:
        """Raise ApiError for the first field of a body that is unknown, or known and not supported."""
        known = (*cls.model_fields, *HINTS, *cls.neutral)
        for name, value in fields.items():
            if name not in cls.neutral:
                _check_known(name, known)
            elif value is not None and value not in cls.neutral[name]:
                allowed = " or ".join(orjson.dumps(choice).decode() for choice in (*cls.neutral[name], None))
                message = f"{name} is not supported; leave it out or send {allowed}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        options = fields.get("stream_options")
        if options is not None and not fields.get("stream"):
            raise ApiError(400, "stream_options is only allowed with stream=true", param="stream_options")
        if isinstance(options, Mapping):
            for name in options:
                _check_known(name, StreamOptions.model_fields, "stream_options.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters: the request's values, else the model's ``defaults``, else SamplingParams'."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        recommended = (*names, "repetition_penalty")
        chosen: dict[str, Any] = {name: defaults[name] for name in recommended if name in defaults}
        chosen |= {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **chosen,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


def _check_known(name: str, known: Iterable[str], where: str = "") -> None:
    known = tuple(known)
    if name in known:
        return
    name = clip(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ApiError(400, f"unknown field {where + name!r}{hint}", param=where + name, code="unknown_parameter")
