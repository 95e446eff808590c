from __future__ import annotations

import random

import pytest

from treadle.runtime.garbage import Garbage
from treadle.runtime.request import Output
from treadle.serve.bench.play import EnginePlayer, Trace


def prompts(count: int, length: int) -> list[list[int]]:
    return [random.choices(range(160), k=length) for _ in range(count)]


def test_every_prompt_gets_its_tokens_in_the_order_of_time(engine):
    player = EnginePlayer(engine, Garbage())
    traces = player.play(prompts(6, 9), 5)
    assert [len(trace.token_s) for trace in traces] == [5] * 6
    for trace in traces:
        assert trace.token_s == sorted(trace.token_s)
        assert trace.ttft_s > 0
        assert len(trace.itl_s) == 4
        assert sum(trace.itl_s) == pytest.approx(4 * trace.tpot_s)
    assert len({trace.arrival_s for trace in traces}) == 1
    assert len(player.play(prompts(1, 3), 1)[0].token_s) == 1
    assert not engine.has_work


def test_the_temperature_is_the_recipes():
    class Keeping:
        has_work = True

        def add(self, request):
            self.request = request

        def step(self):
            self.has_work = False
            return [Output(id=self.request.id, token_ids=[1])]

    for temperature in (0.0, 1.0):
        engine = Keeping()
        EnginePlayer(engine, Garbage(), temperature=temperature).play([[1]], 1)
        assert engine.request.params.temperature == temperature


def test_requests_arrive_when_they_are_said_to(engine):
    traces = EnginePlayer(engine, Garbage()).play(prompts(3, 4), 2, at_s=[0.0, 0.05, 0.3])
    begin = traces[0].arrival_s
    assert [trace.arrival_s - begin for trace in traces] == pytest.approx([0.0, 0.05, 0.3])
    assert traces[0].token_s[-1] < traces[2].arrival_s < traces[2].token_s[0]


class Failing:
    has_work = True

    def add(self, request):
        self.id = request.id

    def step(self):
        return [Output(id=self.id, token_ids=[], finish_reason="error", error="not finite")]


def test_an_engine_that_fails_is_not_measured():
    with pytest.raises(RuntimeError, match="not finite"):
        EnginePlayer(Failing(), Garbage()).play([[1]], 3)


def test_a_trace_knows_its_times():
    trace = Trace(1.0, [3.0, 3.5, 5.0])
    assert (trace.ttft_s, trace.tpot_s, trace.itl_s) == (2.0, 1.0, [0.5, 1.5])
