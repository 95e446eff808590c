"""The bodies of /v1/completions and /v1/chat/completions, and how a body is read."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from treadle.serve.errors import ApiError
from treadle.serve.openai.fields import GenerationFields

MAX_BODY_BYTES = 32 << 20
MAX_PROMPTS = 256
"""prompts in one /v1/completions request"""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat runs to the end of the context"""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | list[TokenId]


class CompletionRequest(GenerationFields):
    """Body of /v1/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.neutral | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
    }

    prompt: Annotated[str | list[str] | list[TokenId] | list[list[TokenId]], Field(union_mode="left_to_right")]
    logprobs: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts, each a text or token ids. Raises ApiError."""
        many = self.prompt
        if isinstance(many, str) or (many and isinstance(many[0], int)):
            return [many]
        if not 1 <= len(many) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt holds {len(many)} prompts; 1 to {MAX_PROMPTS} are allowed", param="prompt")
        return many  # type: ignore[return-value]

    @property
    def token_limit(self) -> int:
        """Return how many tokens may be generated."""
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class Message(BaseModel):
    """One message of a chat; what its parts may be is the chat template's to say."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """Return the message as chat templates know it. Raises ApiError."""
        if self.role in ("tool", "function"):
            at = f"{where}.role"
            raise ApiError(400, f"{at}: tools are not supported", param=at, code="unsupported_value")
        for name, value in (self.model_extra or {}).items():
            # What a server returns with an answer comes back empty in the next turn.
            if value not in (None, [], ""):
                at = f"{where}.{name}"
                raise ApiError(400, f"{at} is not supported; leave it out", param=at, code="unsupported_parameter")
        # Templates know the older name of a developer's message.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(GenerationFields):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.neutral | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "prompt_logprobs": (),
        "echo": (False,),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Raises ApiError."""
        return [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def token_limit(self) -> int | None:
        """Return how many tokens may be generated; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def size(self) -> int:
        """Return about how many characters the messages have."""
        return sum(len(str(message.content)) for message in self.messages)

    @property
    def logprob_count(self) -> int | None:
        """Return how many alternatives are wanted, None if no logprobs are. Raises ApiError."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise ApiError(400, "top_logprobs is only allowed with logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


Body = TypeVar("Body", bound=GenerationFields)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the validated body. Raises ApiError: 413 too large, 400 everything else."""
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                # The rest will not be read, so the connection cannot be used again.
                close = {"connection": "close"}
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", headers=close)
    except ClientDisconnect:
        raise ApiError(400, "the client left while sending its body") from None
    try:
        body = kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise _invalid(error) from None
    body.refuse_extra()
    return body


def _invalid(error: ValidationError) -> ApiError:
    """Return the first thing wrong with a body, naming its field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    param = _param(first["loc"])
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_parameter")
    if not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    # Each branch of a union complains for itself.
    reasons = dict.fromkeys(problem["msg"] for problem in problems if _param(problem["loc"]) == param)
    return ApiError(400, f"{param}: {'; or: '.join(reasons)}", param=param, code="invalid_value")


def _param(loc: tuple[int | str, ...]) -> str:
    """Return a location as a client would write it, up to the first union branch, whose name is not a field's."""
    param = ""
    for step in loc:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step.isidentifier() and not step[0].isupper() and step not in ("str", "list", "int"):
            param += f".{step}" if param else step
        else:
            break
    return param
