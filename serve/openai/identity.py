"""The names of one request: the client's own or a new one, and another that nobody else can guess or repeat."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

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
        """Return the names of a request: from its body, else from its header X-Request-Id, else new ones."""
        header = http.headers.get(HEADER, "")[:MAX_ID]
        name = chosen or (header if header.isascii() and header.isprintable() else "")
        return cls(shown=name or uuid.uuid4().hex)

    def response(self, kind: str) -> str:
        """Return the id of a response object: ``chatcmpl-...``."""
        return f"{kind}-{self.shown}"
