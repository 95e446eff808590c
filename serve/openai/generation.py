"""The fields that both generation endpoints take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from treadle.runtime.request import RequestError, SamplingParams, SessionHint
from treadle.serve.errors import ApiError
from treadle.serve.openai.fields import Fields, check_known

Ids = Annotated[list[int], Field(fail_fast=True)]
MAX_ID = 200
"""characters of a request's id"""


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """every chunk has the usage so far"""
    include_obfuscation: bool = False


class CacheHints(BaseModel):
    """What the client knows of its session's next turn."""

    model_config = ConfigDict(strict=True, frozen=True)

    pin_s: float = 0.0
    """seconds after the answer's end for which the session's state is to stay on the device"""
    demote: bool = False
    """the session pauses: its state may leave the device once this answer ends"""
    prefetch: bool = False
    """bring the state of this prompt to the device; nothing is generated"""


class GenerationFields(Fields):
    """Fields of both /v1/completions and /v1/chat/completions."""

    hints: ClassVar[frozenset[str]] = frozenset(
        ("user", "metadata", "store", "safety_identifier", "prompt_cache_retention", "service_tier")
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "priority": (0,),
        "kv_transfer_params": ({},),
        "vllm_xargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprob_token_ids: Ids | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """tokens of log-probabilities are called token_id:5"""
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    """names the session where session_id does not"""
    cache_hints: CacheHints | None = None
    skip_reading_prefix_cache: bool | None = None
    return_cached_tokens_details: bool = False
    """usage says where cached tokens were, and why the others were not"""
    request_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def refuse_unknown(cls, fields: Mapping[str, Any]) -> None:
        """Raise ApiError for the first field of a body that is unknown, or known and not supported."""
        super().refuse_unknown(fields)
        hints = fields.get("cache_hints")
        if isinstance(hints, Mapping):
            for name in hints:
                check_known(name, CacheHints.model_fields, "cache_hints.")
        options = fields.get("stream_options")
        if options is not None and not fields.get("stream"):
            message = "stream_options is only allowed with stream=true"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        if isinstance(options, Mapping):
            for name in options:
                check_known(name, StreamOptions.model_fields, "stream_options.")
        if fields.get("stream") and fields.get("prompt_logprobs") is not None:
            message = "prompt_logprobs is only allowed without stream=true; /v1/completions streams them with echo"
            raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
        if (
            fields.get("stream")
            and fields.get("echo")
            and fields.get("logprobs") is not None
            and fields.get("n") not in (None, 1)
        ):
            message = "echo with logprobs and several answers is only allowed without stream=true"
            raise ApiError(400, message, param="n", code="invalid_value")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.include_usage and self.stream_options.continuous_usage_stats

    @property
    def session(self) -> SessionHint | None:
        """Return what is known of the session, None if it has no name. Raises ApiError."""
        field = "prompt_cache_key" if self.session_id is None else "session_id"
        name, hints = getattr(self, field), self.cache_hints
        if name is None and hints is None:
            return None
        if name is None:
            message = "cache_hints are about a session; name it with session_id or prompt_cache_key"
            raise ApiError(400, message, param="session_id", code="missing_required_parameter")
        try:
            return SessionHint(id=name, **({} if hints is None else hints.model_dump()))
        except RequestError as error:
            # The hint's own field, which begins the message, has another name here.
            its = error.field or ""
            field = field if its == "id" else f"cache_hints.{its}"
            raise ApiError(400, field + str(error).removeprefix(its), param=field, code="invalid_value") from error

    def sampling(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Return the sampling parameters: the request's values, else the model's ``defaults``, else SamplingParams'.

        A ``max_tokens`` of None is the default's, and then as many as the context holds.
        """
        max_tokens = defaults.get("max_tokens") if max_tokens is None else max_tokens
        given = {name: value for name in _PARAMS if (value := getattr(self, name)) is not None}
        limits = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        return SamplingParams(**{**defaults, **given, **limits})


_PARAMS = sorted(
    (GenerationFields.model_fields.keys() & set(SamplingParams.__struct_fields__)) - {"max_tokens", "prompt_logprobs"}
)
"""fields that are handed on as they are"""
