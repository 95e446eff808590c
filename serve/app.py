"""The HTTP routes of one served model, and what each kind of failure looks like to a client."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from treadle.conf.secret import opens
from treadle.runtime.request import RequestError
from treadle.serve.errors import ApiError
from treadle.serve.events import ClientLeftError
from treadle.serve.openai.chat import chat_completions
from treadle.serve.openai.completions import completions
from treadle.serve.openai.requests import ChatRequest, CompletionRequest
from treadle.serve.service import Service
from treadle.serve.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

Handler = Callable[[Service, Request], Awaitable[Response]]

CLIENT_LEFT = 499
"""the status that logs show for a client that did not wait; nobody receives it"""


def create_app(service: Service) -> ASGIApp:
    """Return the application. With serve.api_key (plain or sealed) every path asks for it but /health.

    /metrics does not either where serve.metrics_open says so.
    """
    config = service.config
    # FastAPI's own documentation pages load scripts from elsewhere; the schema alone is served.
    app = FastAPI(title="treadle", version=version("treadle"), docs_url=None, redoc_url=None)
    _add(app, service, "POST", "/v1/completions", completions, CompletionRequest.model_json_schema())
    _add(app, service, "POST", "/v1/chat/completions", chat_completions, ChatRequest.model_json_schema())
    _add(app, service, "GET", "/v1/models", _models)
    _add(app, service, "GET", "/v1/models/{name:path}", _model)
    _add(app, service, "POST", "/tokenize", tokenize, TokenizeRequest.model_json_schema())
    _add(app, service, "POST", "/detokenize", detokenize, DetokenizeRequest.model_json_schema())
    _add(app, service, "GET", "/health", _health)
    _add(app, service, "GET", "/ping", _health)
    _add(app, service, "POST", "/ping", _health)
    _add(app, service, "GET", "/load", _load)
    _add(app, service, "GET", "/version", _version)
    if config.metrics:
        _add(app, service, "GET", "/metrics", _metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ClientLeftError, _client_left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    open_paths = ("/health", "/metrics") if config.metrics_open else ("/health",)
    return app if config.api_key is None else RequireKey(app, config.api_key, open_paths)


class RequireKey:
    """Lets a request through with the right bearer key, or to an open path; unknown paths ask for the key too."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass on."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            kind, _, key = Request(scope).headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not opens(self._api_key, key.strip()):
                message = "this server needs its API key: send the header 'Authorization: Bearer KEY'"
                error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _add(
    app: FastAPI, service: Service, method: str, path: str, handler: Handler, schema: dict[str, Any] | None = None
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=f"{method.lower()}_{handler.__name__.removeprefix('_')}",
        response_model=None,
        openapi_extra=body if schema is not None else None,
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _models(service: Service, _request: Request) -> Response:
    return _json({"object": "list", "data": [_card(service)]})


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["name"])
    return _json(_card(service))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "treadle",
        "root": service.name,
        "parent": None,
        "max_model_len": service.limits.max_len,
    }


async def _health(service: Service, _request: Request) -> Response:
    trouble = service.client.trouble()
    if trouble is not None:
        raise ApiError(503, trouble, code="engine_unhealthy")
    return _json({"status": "ok"})


async def _load(service: Service, _request: Request) -> Response:
    return _json({"server_load": service.client.in_flight})


async def _version(service: Service, _request: Request) -> Response:
    return _json({"version": version("treadle"), "fingerprint": service.fingerprint})


async def _metrics(service: Service, _request: Request) -> Response:
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return ApiError(400, str(error), param=error.field, code="invalid_value").response()


async def _client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    routes: list[Route] = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 404:
        paths = [route.path for route in routes if method in (route.methods or ())]
        close = difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
        message = f"there is no {method} {path}" + (f"; did you mean {close[0]}?" if close else "")
        return ApiError(404, message, code="unknown_url").response()
    if error.status_code == 405:
        # Of all routes with this path; each knows its own method only.
        fits = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = sorted({each for route in fits for each in route.methods or ()})
        message = f"{path} takes {' or '.join(allowed)}, not {method}"
        return ApiError(405, message, code="method_not_supported", headers={"allow": ", ".join(allowed)}).response()
    return ApiError(error.status_code, f"{method} {path}: {error.detail}", headers=error.headers).response()


async def _internal_error(_request: Request, error: Exception) -> Response:
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error").response()
