"""How a server takes leave: what its clients are told once a signal has come."""

from __future__ import annotations

from treadle.serve.errors import ApiError


class ShuttingDownError(Exception):
    """A request that the server, asked to end, does not finish, or does not take."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")

    def for_client(self) -> ApiError:
        """Return what the request's client is told."""
        return ApiError(503, str(self), code="shutting_down", headers={"retry-after": "1"})
