"""The messages of a chat: how a body brings them, and what the chat template makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from treadle.runtime.text.template import MAX_MESSAGES, ChatTemplate, plain_messages
from treadle.serve.errors import ApiError, clip
from treadle.serve.openai.body import invalid
from treadle.serve.served import Served


class Message(BaseModel):
    """One message of a chat; what its content may be is the chat template's to say."""

    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SkipValidation[str | list[dict[str, Any]] | None] = None
    name: str | None = None
    tool_call_id: str | None = None
    """of a tool's message: which call it answers"""


Messages = SkipValidation[Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]]
"""checked by ``check_messages``, off the event loop"""


class Rendered(NamedTuple):
    """Messages as the template wrote them."""

    last: dict[str, Any]
    """the last message"""
    text: str
    seams: list[int]
    """places in the text where a later prompt may part from it, as far as the engine has a use for them"""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a body says about its prompt: the messages as they came, and how the template is to write them."""

    messages: Any
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def render(self, served: Served) -> Rendered:
        """Return what the template makes of the messages. Raises ApiError, RequestError."""
        if self.chat_template is None:
            template = served.template()
        elif served.config.trust_chat_template:
            template = ChatTemplate(self.chat_template, served.tokenizer.facts.template_tokens)
        else:
            message = "chat_template is code that runs in the server; serve.trust_chat_template=true would let it"
            raise ApiError(400, message, param="chat_template", code="unsupported_parameter")
        messages = check_messages(self.messages, keep_developer=template.mentions("developer"))
        how: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            "extra": self.chat_template_kwargs,
        }
        text = template.render(messages, **how)
        seams = template.seams(messages, text, **how) if served.limits.boundaries else []
        return Rendered(plain_messages(messages[-1:])[0], text, seams)


def check_messages(entries: Any, *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a body for the chat template. Raises ApiError, naming the message at fault."""
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_MESSAGES:
        found = f"; there are {len(entries)}" if isinstance(entries, list) else ""
        message = f"messages: must be an array of at least 1 and at most {MAX_MESSAGES} messages{found}"
        raise ApiError(400, message, param="messages", code="invalid_value")
    return [_plain_message(entry, f"messages[{i}]", keep_developer) for i, entry in enumerate(entries)]


def _plain_message(entry: Any, where: str, keep_developer: bool) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ApiError(400, f"{where}: must be an object with role and content", param=where, code="invalid_value")
    try:
        message = Message.model_validate(entry)
    except ValidationError as error:
        raise invalid(error, where) from None
    for name, value in entry.items():
        # What a server returns with an answer comes back empty in the next turn.
        if name not in Message.model_fields and value not in (None, [], ""):
            at = f"{where}.{clip(name)}"
            raise ApiError(400, f"{at} is not supported; leave it out", param=at, code="unsupported_parameter")
    # Most templates know the older name of a developer's message only.
    role = "system" if message.role == "developer" and not keep_developer else message.role
    plain = {"role": role, "content": message.content}
    extra = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {name: value for name, value in extra.items() if value is not None}
