"""The bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from treadle.runtime.request import MAX_LOGPROBS
from treadle.serve.errors import ApiError
from treadle.serve.openai.generation import GenerationFields
from treadle.serve.openai.messages import Conversation, Messages

MAX_PROMPTS = 256
"""prompts in one /v1/completions request"""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat runs to the end of the context"""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | list[TokenId]


class CompletionRequest(GenerationFields):
    """Body of /v1/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.neutral | {"suffix": ("",)}
    elsewhere: ClassVar[dict[str, str]] = {"messages": "/v1/chat/completions"}

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
            message = f"prompt holds {len(many)} prompts; 1 to {MAX_PROMPTS} are allowed"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        for i, one in enumerate(many):
            if type(one) is not type(many[0]):
                at, kind = f"prompt[{i}]", "a string" if isinstance(many[0], str) else "an array of token ids"
                raise ApiError(400, f"{at}: must be {kind}, as prompt[0] is", param=at, code="invalid_value")
        return many

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompt is wanted back."""
        return self.echo and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        """Return how many tokens may be generated: one, which is left out of the answer, where none is wanted.

        None: as the model recommends, or COMPLETION_MAX_TOKENS.
        """
        return 1 if self.only_echo else self.max_tokens

    @property
    def prompt_logprob_count(self) -> int | None:
        """Return how many alternatives are wanted for tokens of the prompt, None if no log-probabilities are."""
        wanted = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((count for count in wanted if count is not None), default=None)


class ChatRequest(GenerationFields):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.neutral | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "include_reasoning": (True,),
        "thinking_token_budget": (),
        "verbosity": (),
        "web_search_options": (),
    }
    elsewhere: ClassVar[dict[str, str]] = {"prompt": "/v1/completions"}

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def conversation(self) -> Conversation:
        """Return what makes the prompt."""
        return Conversation(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
        )

    @property
    def token_limit(self) -> int | None:
        """Return how many tokens may be generated; None: as the model recommends, or as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        """Return how many alternatives are wanted, None if no logprobs are. Raises ApiError."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                message = "top_logprobs is only allowed with logprobs=true"
                raise ApiError(400, message, param="top_logprobs", code="invalid_value")
            return None
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            message = f"top_logprobs={count} is outside [0, {MAX_LOGPROBS}]"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        return count
