"""The HTTP process: starts the engine process, waits for it, serves, drains, and says why when something ends it."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console

from treadle.conf.errors import ConfigError
from treadle.conf.schema import ServeConfig
from treadle.runtime.protocol import Endpoints, Progress
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.tokenizer import Tokenizer
from treadle.serve.descriptors import connection_limits
from treadle.serve.drain import Gate, ShuttingDownError
from treadle.serve.engine_client import EngineClient
from treadle.serve.engine_process import EngineDiedError, EngineProcess
from treadle.serve.folder import private_folder
from treadle.serve.ready import Row, ready_table
from treadle.serve.startup import Startup

if TYPE_CHECKING:
    import uvicorn

    from treadle.serve.service import Service

CUT_S = 1.0
"""seconds that answers which are cut off get to reach their clients"""

LOOK_S = 0.02
"""seconds between two looks at whether all requests have ended"""

LEAVE_S = 5.0
"""seconds that the engine process gets to leave before it is killed"""

KEEP_ALIVE_S = 65
"""longer than the idle limit of usual client pools and proxies, which then close first"""

EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_SIGNAL = 128
"""and the signal's number, as shells count: it came before the server was ready"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a server needs to know; no model is loaded to make one."""

    config: ServeConfig
    name: str
    fingerprint: str
    limits: Limits
    capacity: int
    """requests in flight, running and waiting together"""
    load_tokenizer: Callable[[], Tokenizer]
    command: Callable[[Endpoints], Sequence[str]]
    """the engine process's command line"""
    deployment: bytes
    """what the engine process reads"""
    summary: Sequence[Row] = ()
    """what is said of the deployment when it is ready"""
    cache_info: Mapping[str, str] = field(default_factory=dict)
    """labels of the metric cache_config_info"""


def serve(plan: Plan, console: Console) -> int:
    """Serve until a signal or the engine's death ends it. Returns the exit code.

    0: drained. 1: the engine died, or answers were cut off. 2: a mistake in the configuration. 128 and its number: a
    signal before it was ready.
    Raises ConfigError if the port cannot be had.
    """
    startup = Startup(console, "configure")
    listener = _bind(plan.config)
    try:
        with private_folder() as endpoints:
            return uvloop.run(_run(plan, endpoints, listener, startup, console))
    finally:
        startup.finish()
        listener.close()


async def _run(plan: Plan, endpoints: Endpoints, listener: socket.socket, startup: Startup, console: Console) -> int:
    return await Server(plan, endpoints, listener, startup, console).run()


class Server:
    """One run of the server, from the first phase to the exit code. Made inside a running event loop."""

    def __init__(
        self, plan: Plan, endpoints: Endpoints, listener: socket.socket, startup: Startup, console: Console
    ) -> None:
        loop = asyncio.get_running_loop()
        self._plan = plan
        self._listener = listener
        self._startup = startup
        self._console = console
        self._stop: asyncio.Future[signal.Signals] = loop.create_future()
        """done at the first signal, which it holds"""
        self._cut: asyncio.Future[None] = loop.create_future()
        """done at the second"""
        self._death: asyncio.Future[None] = loop.create_future()
        """done when the engine process has ended"""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup's wish holds.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        startup.phase("start engine process")
        endpoints.deployment.write_bytes(plan.deployment)
        self._client = EngineClient(endpoints, plan.capacity)
        self._client.start(self._on_progress)
        self._process = EngineProcess(
            endpoints,
            plan.command(endpoints),
            on_line=startup.line,
            on_exit=lambda: loop.call_soon_threadsafe(self._on_exit),
        )

    async def run(self) -> int:
        """Serve. Returns the exit code."""
        # Only an engine that was asked to leave gets time to do so.
        grace_s = 0.0
        try:
            service = await self._start()
            if service is None:
                number = self._stop.result()
                self._startup.finish()
                self._startup.line(f"treadle: ended by {number.name} before it was ready")
                return EXIT_SIGNAL + number
            code = await self._serve(service)
            grace_s = LEAVE_S
            return code
        except EngineDiedError as error:
            self._startup.finish()
            self._startup.line(f"treadle: {error}")
            return EXIT_USER if error.user else EXIT_FAILURE
        finally:
            await self._client.close()
            await asyncio.to_thread(self._process.stop, grace_s)

    async def _start(self) -> Service | None:
        """Return the service once engine and tokenizer are ready; None if a signal came first."""
        text = asyncio.ensure_future(asyncio.to_thread(self._make_service))
        ready = asyncio.ensure_future(self._client.ready.wait())
        if not await self._until(ready):
            ready.cancel()
            return None
        self._startup.phase("tokenizer")
        return await text if await self._until(text) else None

    def _make_service(self) -> Service:
        # While the engine process loads, so that these imports cost no time.
        import treadle.serve.app  # noqa: F401
        from treadle.runtime.text.template import ChatTemplate, chat_template
        from treadle.serve.metrics import Metrics
        from treadle.serve.service import Service

        tokenizer = self._plan.load_tokenizer()

        @cache
        def template() -> ChatTemplate:
            return chat_template(tokenizer.facts.chat_templates, tokenizer.facts.template_tokens)

        return Service(
            name=self._plan.name,
            fingerprint=self._plan.fingerprint,
            created=int(time.time()),
            tokenizer=tokenizer,
            template=template,
            limits=self._plan.limits,
            config=self._plan.config,
            client=self._client,
            metrics=Metrics(
                lambda: self._client.stats,
                self._plan.name,
                prefix=self._plan.config.metrics_prefix,
                cache_info=self._plan.cache_info,
            ),
        )

    async def _serve(self, service: Service) -> int:
        """Serve until a signal. Returns the exit code. Raises EngineDiedError after telling every client."""
        from treadle.serve.app import create_app

        self._startup.phase("listen")
        gate = Gate(create_app(service))
        http = _http(gate, service.client.capacity)
        serving = asyncio.ensure_future(http.serve(sockets=[self._listener]))
        while not http.started:
            await asyncio.sleep(0.005)
        self._announce()
        try:
            if not await self._until(serving):
                gate.closed = True
                return 0 if await self._drain(http, serving) else EXIT_FAILURE
            raise RuntimeError("the HTTP server stopped by itself") from serving.exception()
        except EngineDiedError as error:
            self._client.fail(error)
            raise
        finally:
            http.should_exit = True
            await asyncio.wait((serving,), timeout=CUT_S)
            # Whoever does not read an answer's end does not hold up the exit.
            for connection in list(http.server_state.connections):
                connection.transport.abort()
            http.force_exit = True
            await asyncio.wait((serving, *http.server_state.tasks), timeout=CUT_S)

    async def _drain(self, http: uvicorn.Server, serving: asyncio.Future[None]) -> bool:
        """Let running requests finish; False if some were cut off, by a second signal or after ``drain_s``.

        The port is open until they have finished, for the gate to refuse new ones.
        """
        limit_s = self._plan.config.drain_s
        if self._client.in_flight:
            wait = f"waiting for {self._count()} to end, for {limit_s:g} s at most"
            self._startup.line(f"shutting down: {wait}; Ctrl-C or another signal cuts off at once what still runs")
        for connection in list(http.server_state.connections):
            # Idle ones close, and requests that are still being sent are refused.
            connection.shutdown()
        until_s = time.monotonic() + limit_s
        while http.server_state.tasks and time.monotonic() < until_s and not await self._ends(LOOK_S):
            pass
        http.should_exit = True
        await self._ends(max(until_s - time.monotonic(), 0.0), serving)
        if self._death.done():
            raise await asyncio.to_thread(self._process.death)
        if not self._client.in_flight:
            return True
        why = "at the second signal" if self._cut.done() else f"after {limit_s:g} s"
        self._startup.line(f"cutting off {self._count()} {why}")
        self._client.end_all(ShuttingDownError())
        return False

    async def _ends(self, limit_s: float, *others: asyncio.Future[None]) -> bool:
        """Wait for the second signal, the engine's death or ``others``; False if none came in time."""
        waits = (self._cut, self._death, *others)
        done, _ = await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _count(self) -> str:
        """Return how many requests run or wait, in words."""
        return f"{self._client.in_flight} request{'s' if self._client.in_flight != 1 else ''}"

    async def _until(self, work: asyncio.Future[Any]) -> bool:
        """Wait for ``work``; False if a signal came first. Raises EngineDiedError if the engine's death did."""
        await asyncio.wait((work, self._stop, self._death), return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise await asyncio.to_thread(self._process.death)
        return not self._stop.done()

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        endpoint = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._startup.finish()
        self._console.print(self._startup.table())
        self._console.print(ready_table(endpoint, self._plan.summary))
        self._startup.line(f"{self._plan.name} answers at {endpoint}")

    def _on_progress(self, message: Progress) -> None:
        self._startup.phase(message.phase, message.at_s, message.done, message.total)

    def _on_exit(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.done():
            self._stop.set_result(number)
        elif not self._cut.done():
            self._cut.set_result(None)


def _http(app: Gate, capacity: int) -> uvicorn.Server:
    """Return the HTTP server, which leaves signals to us."""
    import uvicorn

    from treadle.serve.connection import Connection

    class Http(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    limits = connection_limits(capacity)
    options = uvicorn.Config(
        app,
        http=Connection,
        limit_concurrency=limits.most,
        backlog=limits.backlog,
        ws="none",
        lifespan="off",
        log_config=None,
        # Its warnings are about clients and give hints about uvicorn.
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return Http(options)


def _bind(config: ServeConfig) -> socket.socket:
    """Return a socket that holds the port, not yet listening. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"not an address: {error}", key="serve.host", value=config.host) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        problem, hint = f"cannot listen there: {error.strerror}", "serve.port=0 takes any free port"
        if error.errno == errno.EADDRNOTAVAIL:
            hint = "it must be an address of this machine; serve.host=0.0.0.0 takes all of them"
            raise ConfigError(problem, key="serve.host", value=config.host, hint=hint) from error
        raise ConfigError(problem, key="serve.port", value=config.port, hint=hint) from error
    return listener
