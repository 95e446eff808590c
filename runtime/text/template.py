"""Chat templates: messages to the text a model was trained on, rendered by Jinja in a sandbox."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.runtime.request import RequestError

MAX_MESSAGES = 10_000
END_MARK = "\ue000\ue001\ue000"
"""stands for the end of a content while it is rendered; characters of no language"""
SEAM_MARK = "\ue000\ue002\ue000"
"""stands for a place in a content in the same way"""


class ChatTemplate:
    """One compiled template. Raises RequestError (400) for whatever a template refuses or trips over."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template is not valid Jinja: {error}", "messages") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of ``messages`` (OpenAI's shape).

        ``extra`` are variables of the template, such as enable_thinking; they win over the special tokens. What has a
        parameter of its own is refused there: it would change nothing.
        ``continue_final_message`` ends the text where the content of the last message does.
        """
        if documents and not self.mentions("documents"):
            raise RequestError("the chat template has no place for documents", "documents")
        for name in ("messages", "add_generation_prompt", "continue_final_message"):
            if name in (extra or {}):
                message = f"chat_template_kwargs holds {name}, which is a field of its own; send it beside"
                raise RequestError(message, "chat_template_kwargs")
        extra = {"tools": list(tools) if tools else None, "documents": documents or None, **(extra or {})}
        if continue_final_message:
            return self._open_ended(messages, add_generation_prompt, extra)
        variables: dict[str, Any] = {**self._tokens, **extra}
        variables.update(messages=plain_messages(messages), add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(variables)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code: whatever it raises is about these messages
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error

    def seams(self, messages: Sequence[Mapping[str, Any]], text: str, **how: Any) -> list[int]:
        """Return where in ``text`` a later prompt may part from it, as character indices, ascending.

        That is where the words of the first message behind the system's and those of the last one begin, and where the
        latter end. ``text`` is what ``render`` makes of these messages, ``how`` its other arguments. None are found
        where the template looks into the words.
        """
        plain = plain_messages(messages)
        last = len(plain) - 1
        first = next((i for i, each in enumerate(plain) if each["role"] not in ("system", "developer")), last)
        for i in {first, last} - {0}:
            content = plain[i]["content"].lstrip()
            blank = plain[i]["content"][: -len(content) or None]
            plain[i] = {**plain[i], "content": blank + SEAM_MARK + content}
        content = plain[last]["content"].rstrip()
        blank = plain[last]["content"][len(content) :]
        plain[last] = {**plain[last], "content": content + SEAM_MARK + blank}
        try:
            pieces = self.render(plain, **how).split(SEAM_MARK)
        except RequestError:
            return []
        if "".join(pieces) != text:
            return []
        return list(itertools.accumulate(map(len, pieces[:-1])))

    def mentions(self, name: str) -> bool:
        """Whether the source of the template has this word, as a variable, key or text."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def _open_ended(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> str:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message=True goes on with the last message, so add_generation_prompt takes False",
                "continue_final_message",
            )
        *before, last = plain_messages(messages)
        marked = {**last, "content": last["content"] + END_MARK}
        text = self.render([*before, marked], add_generation_prompt=False, extra=extra)
        content, found, _ = text.rpartition(END_MARK)
        if not found:
            raise RequestError(
                "the chat template leaves out the content of the last message, which cannot be continued", "messages"
            )
        return content


def chat_template(templates: Mapping[str, str], tokens: Mapping[str, str], name: str | None = None) -> ChatTemplate:
    """Return the template called ``name``, or the default one.

    Raises RequestError if the model has none, or none of that name.
    """
    if not templates:
        raise RequestError("the model has no chat template; send text to /v1/completions or LLM.generate", "messages")
    wanted = name or ("default" if "default" in templates else next(iter(templates)))
    if wanted not in templates:
        raise RequestError(f"no chat template is called {wanted!r}; there are: {', '.join(templates)}", "chat_template")
    return ChatTemplate(templates[wanted], tokens)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with text parts joined to one string, as templates expect them.

    Raises RequestError naming the field for an empty list, a message without a role, or a part that is not text.
    """
    if not messages:
        raise RequestError("messages is empty; it takes at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", "messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}, not an object with role and content", where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where}.role is {message.get('role')!r}, not a string", f"{where}.role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        text = content
    elif isinstance(content, Sequence):
        text = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    else:
        field = f"{where}.content"
        raise RequestError(f"{field} is a {type(content).__name__}, not a string or a list of text parts", field)
    if text is None and not message.get("tool_calls"):
        raise RequestError(f"{where}.content is missing", f"{where}.content")
    return {**message, "content": text if text is not None else ""}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(f"{where}.type is {kind!r}; this model takes parts of type 'text'", f"{where}.type")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text is {part.get('text')!r}, not a string", f"{where}.text")
    text: str = part["text"]
    return text


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's words for training; here its body is plain text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    # The options and functions that templates on the hub are written against.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
