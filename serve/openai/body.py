"""How a body is read: bounded in bytes and time, and refused at its first mistake however many it holds."""

from __future__ import annotations

import asyncio
import json
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from treadle.serve.errors import ApiError, clip
from treadle.serve.openai.fields import Fields

BODY_S = 30.0
"""seconds that a body may take"""
BODY_BYTES_PER_S = 64 << 10
"""a long body that comes at least this quickly may take longer"""

Body = TypeVar("Body", bound=Fields)


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> tuple[Body, int]:
    """Return the body and its size in bytes. Raises ApiError: 408 too slow, 413 too large, 400 everything else.

    Fields whose type says SkipValidation are as the client sent them: their reader checks them, off the event loop.
    """
    raw = await _read(request, max_bytes)
    try:
        fields = from_json(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    kind.refuse_unknown(fields)
    try:
        return kind.model_validate(fields), len(raw)
    except ValidationError as error:
        raise invalid(error) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _too_large(request, max_bytes)
    raw = bytearray()
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_S) as limit:
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > max_bytes:
                    raise _too_large(request, max_bytes)
                limit.reschedule(began_s + BODY_S + len(raw) / BODY_BYTES_PER_S)
    except ClientDisconnect:
        raise ApiError(400, "the client left while sending its body") from None
    except TimeoutError:
        message = f"the body did not come within {BODY_S:g} s and {BODY_BYTES_PER_S} bytes a second"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    return bytes(raw)


def _too_large(request: Request, max_bytes: int) -> ApiError:
    # The rest is received and dropped, so that the client reads this instead of a reset. A client that waited for
    # permission sends no rest, so what it sends next could not be told from it.
    headers = {"connection": "close"} if "expect" in request.headers else {}
    return ApiError(413, f"the body is larger than {max_bytes} bytes", headers=headers)


def invalid(error: ValidationError, where: str = "") -> ApiError:
    """Return the first thing wrong with the object at ``where`` in a body, naming its field."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    param = _param(first["loc"], where)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    # Each branch of a union complains for itself.
    reasons = dict.fromkeys(_reason(problem["msg"]) for problem in problems if _param(problem["loc"], where) == param)
    message = f"{param}: {'; or: '.join(reasons)}{_given(first['input'])}"
    return ApiError(400, message, param=param, code="invalid_value")


def _given(value: object) -> str:
    """Return what was sent instead, where that is short enough to be said: no array and no object."""
    if isinstance(value, str):
        value = clip(value)
    elif not isinstance(value, bool | int | float | None) or (isinstance(value, int) and value.bit_length() > 64):
        return ""
    return f", not {json.dumps(value, ensure_ascii=False)}"


def _reason(message: str) -> str:
    """Return pydantic's message about Python objects in JSON's words."""
    return message.partition(" or instance of ")[0].replace("dictionary", "object").replace("valid list", "valid array")


def _param(loc: tuple[int | str, ...], where: str) -> str:
    """Return a location as a client would write it, up to the first union branch, whose name is not a field's."""
    param = where
    for step in loc:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step.isidentifier() and not step[0].isupper() and step not in ("str", "list", "int"):
            param += f".{step}" if param else step
        else:
            break
    return param
