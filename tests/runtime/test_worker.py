from __future__ import annotations

import threading

import pytest
import zmq

from treadle.runtime.garbage import Garbage
from treadle.runtime.protocol import Shutdown, decode_outbound, encode
from treadle.runtime.request import Abort, Output, Request, RequestError, SamplingParams, Stats
from treadle.runtime.worker import Loop


class CountingEngine:
    """Gives each request its number of steps so far; ``add`` trips over two ids."""

    def __init__(self):
        self.running: dict[str, int] = {}
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.running)

    def add(self, request):
        if request.id == "refused":
            raise RequestError("too long", "prompt")
        if request.id == "bug":
            raise KeyError("a bug")
        self.running[request.id] = 0

    def abort(self, abort):
        self.running.pop(abort.id, None)

    def step(self):
        self.steps += 1
        outputs = []
        for name in list(self.running):
            self.running[name] += 1
            last = self.running[name] == 3
            outputs.append(Output(id=name, token_ids=[self.running[name]], finish_reason="length" if last else None))
            if last:
                del self.running[name]
        return outputs

    def stats(self):
        return Stats(num_running=len(self.running), steps=self.steps)


class Bench:
    """A loop in a thread, with the other ends of its sockets."""

    def __init__(self):
        self.context = zmq.Context()
        self.requests, receiver = self._pair("inproc://requests", zmq.PUSH, zmq.PULL)
        self.outputs, sender = self._pair("inproc://outputs", zmq.PULL, zmq.PUSH)
        self.outputs.setsockopt(zmq.RCVTIMEO, 5000)
        self.engine = CountingEngine()
        self._sockets = [self.requests, self.outputs, receiver, sender]
        self.thread = threading.Thread(target=Loop(self.engine, receiver, sender, Garbage()).run)
        self.thread.start()

    def _pair(self, address, ours, theirs):
        first, second = self.context.socket(ours), self.context.socket(theirs)
        first.bind(address)
        second.connect(address)
        return first, second

    def send(self, *messages):
        self.requests.send(encode(messages))

    def until_idle(self):
        """Return the packets up to the one whose Stats show nothing running."""
        packets = []
        while True:
            packets.append(decode_outbound(self.outputs.recv()))
            if any(isinstance(message, Stats) and not message.num_running for message in packets[-1]):
                return packets

    def close(self):
        self.send(Shutdown())
        self.thread.join(5)
        assert not self.thread.is_alive()
        for socket in self._sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def request(name):
    return Request(id=name, prompt=[1, 2], params=SamplingParams())


def test_a_step_is_one_packet_whatever_it_moved(bench):
    bench.send(request("a"), request("b"))
    packets = bench.until_idle()
    outputs = [[m for m in packet if isinstance(m, Output)] for packet in packets]
    assert [[(o.id, o.token_ids, o.finish_reason) for o in packet] for packet in outputs] == [
        [("a", [1], None), ("b", [1], None)],
        [("a", [2], None), ("b", [2], None)],
        [("a", [3], "length"), ("b", [3], "length")],
    ]


@pytest.mark.parametrize(
    ("name", "refused", "error"), [("refused", True, "too long"), ("bug", False, "KeyError: 'a bug'")]
)
def test_a_request_that_cannot_be_queued_costs_one_answer(bench, capfd, name, refused, error):
    bench.send(request(name), request("b"))
    outputs = [m for packet in bench.until_idle() for m in packet if isinstance(m, Output)]
    assert [(o.refused, o.error, o.finish_reason) for o in outputs if o.id == name] == [(refused, error, "error")]
    assert [o.token_ids for o in outputs if o.id == "b"] == [[1], [2], [3]]
    assert ("Traceback" in capfd.readouterr().err) is not refused


def test_an_abort_is_seen_before_the_next_step(bench):
    bench.send(request("a"), Abort(id="a"), Abort(id="unknown"))
    assert all(not isinstance(m, Output) for packet in bench.until_idle() for m in packet)
    assert bench.engine.steps == 0


def test_an_idle_loop_blocks(bench):
    bench.send(request("a"))
    bench.until_idle()
    assert bench.outputs.poll(300) == 0


def test_an_idle_loop_says_what_changes_without_a_step(monkeypatch):
    monkeypatch.setattr("treadle.runtime.worker.IDLE_S", 0.05)
    bench = Bench()
    try:
        for pages in (1, 2):
            monkeypatch.setattr(bench.engine, "stats", lambda: Stats(pages_total=pages))  # noqa: B023
            found = 0
            while found != pages:
                ((message,),) = [decode_outbound(bench.outputs.recv())]
                found = message.pages_total
        assert bench.engine.steps == 0
    finally:
        bench.close()


def test_many_requests_do_not_hold_up_those_that_run(monkeypatch):
    monkeypatch.setattr("treadle.runtime.worker.RECEIVE_S", 0.0)
    bench, sent, steps = Bench(), threading.Event(), []
    add = bench.engine.add

    def slow_add(request):
        sent.wait()
        steps.append(bench.engine.steps)
        add(request)

    monkeypatch.setattr(bench.engine, "add", slow_add)
    try:
        for i in range(3):
            bench.send(Request(id=f"r{i}", prompt=[1], params=SamplingParams()))
        sent.set()
        bench.until_idle()
    finally:
        bench.close()
    assert steps == [0, 1, 2]
