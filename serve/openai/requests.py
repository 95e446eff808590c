"""The bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from treadle.runtime.text.template import MAX_MESSAGES
from treadle.serve.errors import ApiError, clip
from treadle.serve.openai.body import invalid
from treadle.serve.openai.fields import GenerationFields

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

    prompt: SkipValidation[str | list[str] | list[TokenId] | list[list[TokenId]]]
    logprobs: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts, each a text or a list that still has to prove to be token ids. Raises ApiError."""
        many: Any = self.prompt
        if isinstance(many, str):
            return [many]
        if not isinstance(many, list):
            message = "prompt: must be a string, an array of token ids, or an array of such prompts"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if many and not isinstance(many[0], str | list):
            return [many]
        if not 1 <= len(many) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt holds {len(many)} prompts; 1 to {MAX_PROMPTS} are allowed", param="prompt")
        for i, one in enumerate(many):
            if type(one) is not type(many[0]):
                at, kind = f"prompt[{i}]", "a string" if isinstance(many[0], str) else "an array of token ids"
                raise ApiError(400, f"{at}: must be {kind}, as prompt[0] is", param=at, code="invalid_value")
        return many


class Message(BaseModel):
    """One message of a chat; what its content may be is the chat template's to say."""

    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SkipValidation[str | list[dict[str, Any]] | None] = None
    name: str | None = None


def plain_message(entry: Any, where: str) -> dict[str, Any]:
    """Return the message at ``where`` in a body as chat templates know it. Raises ApiError."""
    if not isinstance(entry, dict):
        raise ApiError(400, f"{where}: must be an object with role and content", param=where, code="invalid_value")
    try:
        message = Message.model_validate(entry)
    except ValidationError as error:
        raise invalid(error, where) from None
    if message.role in ("tool", "function"):
        at = f"{where}.role"
        raise ApiError(400, f"{at}: tools are not supported", param=at, code="unsupported_value")
    for name, value in entry.items():
        # What a server returns with an answer comes back empty in the next turn.
        if name not in Message.model_fields and value not in (None, [], ""):
            at = f"{where}.{clip(name)}"
            raise ApiError(400, f"{at} is not supported; leave it out", param=at, code="unsupported_parameter")
    # Templates know the older name of a developer's message.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content}
    return plain if message.name is None else plain | {"name": message.name}


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

    messages: SkipValidation[Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Raises ApiError."""
        entries: Any = self.messages
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_MESSAGES:
            found = f"; there are {len(entries)}" if isinstance(entries, list) else ""
            message = f"messages: must be an array of at least 1 and at most {MAX_MESSAGES} messages{found}"
            raise ApiError(400, message, param="messages", code="invalid_value")
        return [plain_message(entry, f"messages[{i}]") for i, entry in enumerate(entries)]

    @property
    def token_limit(self) -> int | None:
        """Return how many tokens may be generated; None: as the model recommends, or as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        """Return how many alternatives are wanted, None if no logprobs are. Raises ApiError."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise ApiError(400, "top_logprobs is only allowed with logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0
