"""The names of one request: the client's own or a new one, and another that nobody else can guess or repeat."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from treadle.serve.errors import ApiError
from treadle.serve.openai.generation import MAX_ID

HEADER = "x-request-id"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """``shown`` is what a client knows a request by; the engine knows it as ``internal``.

    Two clients may choose one name, and neither may end or read the other's answer by it.
    """

    shown: str
    internal: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, http: HttpRequest, chosen: str | None) -> Identity:
        """Return the names of a request: from its body, else from its header X-Request-Id, else new ones.

        Raises ApiError for a name in the body that no header can hold.
        """
        if chosen and not _fits_header(chosen):
            message = f"request_id: comes back in the header {HEADER}, so it takes printable ASCII only"
            raise ApiError(400, message, param="request_id", code="invalid_value")
        header = http.headers.get(HEADER, "")[:MAX_ID]
        return cls(shown=chosen or (header if _fits_header(header) else "") or uuid.uuid4().hex)

    def response(self, kind: str) -> str:
        """Return the id of a response object: ``chatcmpl-...``."""
        return f"{kind}-{self.shown}"


def _fits_header(name: str) -> bool:
    return name.isascii() and name.isprintable()
