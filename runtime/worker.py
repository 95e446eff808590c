"""The engine process: build the engine, then take requests, step, send outputs.

Run as ``python -m treadle.runtime.worker FOLDER``. The deployment arrives resolved in a file and is never composed
again. The process ends with its parent, which holds the other end of standard input: it closes however the parent dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from treadle.runtime.garbage import Garbage
from treadle.runtime.protocol import (
    HEARTBEAT_S,
    Endpoints,
    Failure,
    Heartbeat,
    Inbound,
    Outbound,
    Progress,
    Ready,
    Shutdown,
    decode_inbound,
    encode,
)
from treadle.runtime.request import Abort, Output, Request, RequestError, Stats

STATS_S = 0.25
"""seconds between two Stats while the engine works"""

IDLE_S = 1.0
"""seconds between two Stats while it does not: stores open, fail and finish what they save without a step"""

RECEIVE_S = 0.02
"""seconds after which requests that still wait to be taken in let those that run have a step"""

EXIT_USER = 2
"""exit code for a mistake in the configuration, already explained in the Failure"""


class StepEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run."""
        ...

    def abort(self, abort: Abort) -> None:
        """End a request; unknown ids are ignored."""
        ...

    def step(self) -> list[Output]:
        """Run one step and return the new tokens."""
        ...

    def stats(self) -> Stats:
        """Return gauges and counters."""
        ...


class Loop:
    """Feeds one engine from one socket and sends its outputs to another, until Shutdown.

    The loop polls while there is work; when there is none it blocks, but for Stats every IDLE_S.
    """

    def __init__(
        self, engine: StepEngine, receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes], garbage: Garbage
    ) -> None:
        self._engine, self._garbage = engine, garbage
        self._receiver = receiver
        receiver.setsockopt(zmq.RCVTIMEO, round(IDLE_S * 1000))
        self._sender = sender
        self._stats_due_s = 0.0
        self.step_started_s: float | None = None
        """when the current step began; None between steps. The heartbeat's thread reads it"""

    def run(self) -> None:
        """Serve until Shutdown arrives."""
        engine = self._engine
        while True:
            replies: list[Outbound] = []
            if not self._receive(replies):
                return
            if stepped := engine.has_work:
                self.step_started_s = time.monotonic()
                replies += engine.step()
                self.step_started_s = None
            now = time.monotonic()
            if now >= self._stats_due_s or not engine.has_work:
                replies.append(engine.stats())
                self._stats_due_s = now + STATS_S
            if replies:
                self._sender.send(encode(replies))
            if stepped:
                self._garbage.look(idle=not engine.has_work)

    def _receive(self, replies: list[Outbound]) -> bool:
        """Hand waiting messages to the engine, as many as RECEIVE_S allows beside its work; False after Shutdown."""
        until_s = time.monotonic() + RECEIVE_S
        flags = zmq.NOBLOCK if self._engine.has_work else 0
        while True:
            try:
                packet = self._receiver.recv(flags)
            except zmq.Again:
                return True
            flags = zmq.NOBLOCK
            for message in decode_inbound(packet):
                if isinstance(message, Shutdown):
                    return False
                self._dispatch(message, replies)
            if self._engine.has_work and time.monotonic() >= until_s:
                return True

    def _dispatch(self, message: Inbound, replies: list[Outbound]) -> None:
        if isinstance(message, Abort):
            self._engine.abort(message)
        elif isinstance(message, Request):
            # One request that cannot be queued costs one answer, never the loop.
            try:
                self._engine.add(message)
            except RequestError as error:
                refusal = Output(id=message.id, token_ids=[], finish_reason="error", error=str(error), refused=True)
                replies.append(refusal)
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
                replies.append(Output(id=message.id, token_ids=[], finish_reason="error", error=text))


def serve_engine(endpoints: Endpoints, make: Callable[[Reporter], StepEngine]) -> int:
    """Make an engine, reporting its phases, and serve it until the parent is done. Returns the exit code."""
    signal.signal(signal.SIGINT, _leave_to_parent)
    signal.signal(signal.SIGTERM, _leave_to_parent)
    _exit_with_parent()
    context = zmq.Context()
    sender = _connect(context, zmq.PUSH, endpoints.outputs)
    receiver = _connect(context, zmq.PULL, endpoints.requests)
    try:
        engine = make(Reporter(sender))
        with Garbage() as garbage:
            loop = Loop(engine, receiver, sender, garbage)
            sender.send(encode([Ready(at_s=time.monotonic(), stats=engine.stats())]))
            _beat(context, endpoints, loop)
            loop.run()
    except Exception as error:
        user = isinstance(error, ValueError) and type(error).__module__.startswith("treadle.")
        if not user:
            traceback.print_exc()
        message = str(error) if user else f"{type(error).__name__}: {error}"
        endpoints.failure.write_bytes(msgspec.json.encode(Failure(message=message, user=user)))
        return EXIT_USER if user else 1
    return 0


class Reporter:
    """An OnPhase that sends Progress: every change of phase, and at most ten bar movements a second."""

    def __init__(self, sender: zmq.Socket[bytes]) -> None:
        self._sender = sender
        self._phase = ""
        self._sent_s = 0.0

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Send a Progress if it says something new."""
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._sent_s < 0.1:
            return
        self._phase, self._sent_s = phase, now
        self._sender.send(encode([Progress(phase=phase, at_s=now, done=done, total=total)]))


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def _leave_to_parent(signum: int, frame: object) -> None:
    """Do nothing: a signal to the whole group is the parent's to act on; it drains, then sends Shutdown."""


def _exit_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _beat(context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, loop: Loop) -> None:
    """Start the heartbeat on a socket of its own, since sockets belong to one thread."""

    def beat() -> None:
        socket = _connect(context, zmq.PUSH, endpoints.outputs)
        while True:
            started = loop.step_started_s
            socket.send(encode([Heartbeat(step_s=time.monotonic() - started if started else 0.0)]))
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def main(folder: str) -> int:
    """Serve the deployment found in ``folder``. Returns the exit code."""
    endpoints = Endpoints(folder)

    def make(on_phase: Reporter) -> StepEngine:
        on_phase("import torch")
        from treadle.runtime.build import build_engine, read_deployment

        return build_engine(read_deployment(endpoints.deployment), on_phase)

    return serve_engine(endpoints, make)


if __name__ == "__main__":
    code = main(sys.argv[1])
    # Daemon threads and device runtimes have nothing left to say; a slow teardown would only delay the parent.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
