"""What a client is told when its request cannot be served, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


class ApiError(Exception):
    """An answer other than 200: status, what is wrong, and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A client's own words, some of which any message may repeat, come back shortened.
        message = clip(message, 1000) if status < 500 else message
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else clip(param, 200)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object that stands for this error, also inside an event stream."""
        return {
            "error": {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        """Return the whole answer."""
        return Response(orjson.dumps(self.body()), self.status, self.headers, media_type="application/json")


def error_type(status: int) -> str:
    """Return OpenAI's name for a kind of failure."""
    names = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    if status in names:
        return names[status]
    return "invalid_request_error" if status < 500 else "server_error"


def clip(text: str, most: int = 100) -> str:
    """Return ``text``, without its middle if it is longer than about ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"
