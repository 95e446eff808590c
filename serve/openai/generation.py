"""The fields that both generation endpoints take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from treadle.runtime.request import SamplingParams
from treadle.serve.errors import ApiError
from treadle.serve.openai.fields import Fields, check_known


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """every chunk has the usage so far"""
    include_obfuscation: bool = False


class GenerationFields(Fields):
    """Fields of both /v1/completions and /v1/chat/completions."""

    hints: ClassVar[frozenset[str]] = frozenset(
        ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
    }

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
        super().refuse_unknown(fields)
        options = fields.get("stream_options")
        if options is not None and not fields.get("stream"):
            raise ApiError(400, "stream_options is only allowed with stream=true", param="stream_options")
        if isinstance(options, Mapping):
            for name in options:
                check_known(name, StreamOptions.model_fields, "stream_options.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters: the request's values, else the model's ``defaults``, else SamplingParams'."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        chosen: dict[str, Any] = {name: defaults[name] for name in names if name in defaults}
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
