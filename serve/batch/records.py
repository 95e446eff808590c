"""The lines of a batch: what each asks for, in our own shape or in that of OpenAI's batch files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from treadle.conf.errors import ConfigError, sibling
from treadle.serve.errors import ApiError
from treadle.serve.openai.body import invalid
from treadle.serve.openai.fields import Fields, check_known
from treadle.serve.openai.requests import ChatRequest, CompletionRequest

URLS: dict[str, type[Fields]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
OPENAI = ("custom_id", "method", "url", "body")
"""the fields of a line of OpenAI's"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line: its number from 1, its id, and its body, or else why it cannot be answered."""

    line: int
    id: str | int | None = None
    """None for a line that has none because it cannot be read"""
    openai: bool = False
    """whether it came, and is to be answered, in OpenAI's shape"""
    body: CompletionRequest | ChatRequest | None = None
    clamp: bool = False
    """its max_tokens is a default, which is ours to shorten"""
    error: ApiError | None = None

    @property
    def key(self) -> str:
        """What tells this line from all others, in the input and in the output."""
        return record_key(self.id, self.line)


def record_key(name: object, line: object) -> str:
    """Return the key of a record by its id, or of one without id by its line."""
    return f"line {line}" if name is None else f"id {name!r}"


def read_records(source: Path, defaults: Mapping[str, Any]) -> Iterator[Record]:
    """Yield what the lines of ``source`` ask for; blank lines are left out, bad ones carry their error.

    ``defaults`` are fields for lines of our own shape that do not have them. Raises ConfigError if it cannot be read.
    """
    seen: dict[str, int] = {}
    for line, raw in _lines(source):
        record = _read(line, raw, defaults)
        first = seen.setdefault(record.key, line)
        if first != line:
            error = ApiError(400, f"the id {record.id!r} is that of line {first} already", param="id")
            record = Record(line=line, openai=record.openai, error=error)
        yield record


def count_records(source: Path) -> int:
    """Return how many lines of ``source`` are not blank. Raises ConfigError if it cannot be read."""
    return sum(1 for _ in _lines(source))


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with source.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    yield line, raw
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", key="input", value=source, nearest=sibling(source)
        ) from None


def _read(line: int, raw: bytes, defaults: Mapping[str, Any]) -> Record:
    name: str | int | None = None
    openai = False
    try:
        try:
            fields = from_json(raw.rstrip())
        except ValueError as error:
            # The parser counts lines too, within this one.
            reason = str(error).replace(" at line 1 column ", " at column ")
            raise ApiError(400, f"line {line} is not valid JSON: {reason}", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "must be a JSON object", code="invalid_json")
        openai = "custom_id" in fields
        key = "custom_id" if openai else "id"
        name = _name(fields.pop(key, None), key, line)
        clamp = not openai and fields.keys().isdisjoint(("max_tokens", "max_completion_tokens"))
        kind, body = _openai(fields) if openai else _ours(fields, defaults)
        kind.refuse_unknown(body)
        if body.get("stream"):
            raise ApiError(400, "stream: answers of a batch come whole", param="stream", code="unsupported_parameter")
        found = kind.model_validate(body)
        assert isinstance(found, CompletionRequest | ChatRequest)
        if isinstance(found, CompletionRequest) and len(found.prompts) != 1:
            message = "prompt: a line of a batch has one prompt; write a line for each"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return Record(line=line, id=name, openai=openai, body=found, clamp=clamp)
    except ValidationError as error:
        return Record(line=line, id=name, openai=openai, error=invalid(error))
    except ApiError as error:
        return Record(line=line, id=name, openai=openai, error=error)


def _name(given: Any, key: str, line: int) -> str | int:
    """Return the id of a line; one that has none gets its number. Raises ApiError."""
    if given is None:
        return f"line-{line}"
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise ApiError(400, f"{key} must be a text or an integer", param=key, code="invalid_value")
    if isinstance(given, int) and not -(2**63) <= given < 2**64:
        message = f"{key} is an integer of more than 64 bits; write it as a text"
        raise ApiError(400, message, param=key, code="invalid_value")
    return given


def _ours(fields: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[type[Fields], dict[str, Any]]:
    if ("prompt" in fields) == ("messages" in fields):
        for name in fields:
            check_known(name, {**CompletionRequest.model_fields, **ChatRequest.model_fields})
        raise ApiError(400, "must have either prompt or messages", param="prompt", code="invalid_value")
    kind: type[Fields] = CompletionRequest if "prompt" in fields else ChatRequest
    limited = "max_completion_tokens" in fields
    wanted = {name: value for name, value in defaults.items() if not (limited and name == "max_tokens")}
    return kind, wanted | fields


def _openai(fields: dict[str, Any]) -> tuple[type[Fields], dict[str, Any]]:
    for name in fields:
        check_known(name, OPENAI)
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise ApiError(400, f"url must be {' or '.join(URLS)}", param="url", code="invalid_value")
    if fields.get("method", "POST") != "POST":
        raise ApiError(400, "method must be POST", param="method", code="invalid_value")
    if not isinstance(body, dict):
        raise ApiError(400, "body must be a JSON object", param="body", code="invalid_value")
    return URLS[url], body
