from __future__ import annotations

import random
from itertools import takewhile

import pytest

from treadle.conf.recipe import Returning, Sessions
from treadle.runtime.garbage import Garbage
from treadle.serve.bench.play import EnginePlayer, Trace
from treadle.serve.bench.sessions import measure_return, measure_sessions

VOCAB = 160


def common(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


class Counting:
    """Answers with one token over and over, and forgets a conversation every ``forgets``-th time that it goes on."""

    def __init__(self, forgets: int = 0) -> None:
        self.fed, self.known, self.forgets, self.turns = 0, set[tuple[int, ...]](), forgets, 0

    def computed_tokens(self) -> int:
        return self.fed

    def play(self, prompts, num_tokens, at_s=None):
        for prompt in prompts:
            whole = (*prompt, *[7] * (num_tokens - 1))
            reused = max((common(each, whole) for each in self.known), default=0)
            if any(each == whole[: len(each)] for each in self.known):
                self.turns += 1
                if self.forgets and self.turns % self.forgets == 0:
                    reused = 0
            self.fed += len(prompt) - min(reused, len(prompt) - 1) + num_tokens - 1
            self.known.add(whole)
        return [Trace(0.0, [2.0 + i for i in range(num_tokens)], [7] * num_tokens) for _ in prompts]


ROW = Sessions(sessions=5, turns=4, parallel=2, system=6, user=9, output=3)


def test_nothing_is_recomputed_where_everything_is_known():
    figures = measure_sessions(ROW, Counting(), VOCAB, random.Random(1))
    assert figures["recomputed_pct"] == 0
    assert figures["ttft_p50_ms"] == figures["first_ttft_p50_ms"] == 2000


def test_what_is_forgotten_is_counted():
    figures = measure_sessions(ROW, Counting(forgets=5), VOCAB, random.Random(1))
    assert 5 < figures["recomputed_pct"] < 30


def test_a_conversation_comes_back():
    row = Returning(context=40, user=5, others=2)
    assert measure_return(row, Counting(), VOCAB, random.Random(1))["recomputed_pct"] == 0
    forgotten = measure_return(row, Counting(forgets=1), VOCAB, random.Random(1))["recomputed_pct"]
    assert forgotten == pytest.approx(100 * 41 / (3 * 40 + 47))


def test_on_an_engine_only_partial_pages_are_computed_again(engine):
    row = Sessions(sessions=3, turns=3, parallel=3, system=8, user=9, output=5)
    figures = measure_sessions(row, EnginePlayer(engine, Garbage()), VOCAB, random.Random(3))
    assert set(figures) == set(row.gives)
    assert figures["recomputed_pct"] < 40
