"""How a server takes leave: what its clients are told once a signal has come."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from treadle.serve.errors import ApiError

HEALTH = ("/health", "/ping")


class ShuttingDownError(Exception):
    """A request that the server, asked to end, does not finish, or does not take."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")

    def for_client(self) -> ApiError:
        """Return what the request's client is told."""
        headers = {"retry-after": "1", "connection": "close"}
        return ApiError(503, str(self), code="shutting_down", headers=headers)


class Gate:
    """The application; once ``closed``, all that asks for work or for health is answered with 503.

    What only looks (GET of /metrics, /load and the like) is answered to the end. The port stays open meanwhile, so
    that a load balancer learns from /health that it is to send nobody here, and clients that come before it did are
    told to try again, at once and in words.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if self.closed and scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] in HEALTH):
            await ShuttingDownError().for_client().response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)
