from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.conf.errors import ConfigError
from treadle.conf.recipe import Arrivals, Decode, Prefill, SharedPrefix, Throughput
from treadle.runtime.garbage import Garbage
from treadle.serve.bench.play import EnginePlayer, Trace
from treadle.serve.bench.quantiles import quantile
from treadle.serve.bench.workload import check_fits, measure, percentiles, span, step_seconds

VOCAB = 160


class Clockwork:
    """Gives a token every second, the first after two, to all prompts at once; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def play(self, prompts, num_tokens, at_s=None):
        self.asked.append((prompts, num_tokens, at_s))
        arrivals = at_s or [0.0] * len(prompts)
        return [Trace(after, [after + 2.0 + i for i in range(num_tokens)]) for after in arrivals]


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        (Prefill(prompt=10), {"ttft_ms": 2000, "prompt_tok_s": 5}),
        (Decode(batch=4, context=3, output=5), {"tpot_ms": 1000, "output_tok_s": 4}),
        (Throughput(requests=6, prompt=3, output=4), {"output_tok_s": 24 / 5, "total_s": 5}),
        (SharedPrefix(requests=2, shared=4, own=3, output=1), {"cold_s": 2, "warm_s": 2, "unshared_s": 2}),
    ],
)
def test_figures_follow_from_the_times(row, figures):
    assert measure(row, Clockwork(), VOCAB, 1) == pytest.approx(figures)


def test_arrivals_are_poisson_and_give_percentiles():
    player = Clockwork()
    figures = measure(Arrivals(rate=20, requests=400, prompt=2, output=3), player, VOCAB, 1)
    assert figures == pytest.approx(
        {f"{w}_p{p}_ms": 2000 if w == "ttft" else 1000 for w in ("ttft", "tpot", "itl") for p in (50, 90, 99)}
    )
    at_s = player.asked[0][2]
    gaps = [b - a for a, b in pairwise(at_s)]
    assert at_s[0] == 0
    assert len(at_s) == 400
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.2)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.2)


def test_equal_seeds_ask_for_the_same_and_others_share_no_beginning():
    row = Throughput(requests=3, prompt=8, output=2)
    player = Clockwork()
    for seed in (1, 1, 2):
        measure(row, player, VOCAB, seed)
    first, again, other = (prompts for prompts, _, _ in player.asked)
    assert first == again
    assert len({tuple(prompt[:4]) for prompt in [*first, *other]}) == 6


def test_what_is_shared_is_found_again(engine):
    row = SharedPrefix(requests=3, shared=16, own=3, output=2)
    before = engine.stats().prefix_hit_tokens
    assert set(measure(row, EnginePlayer(engine, Garbage()), VOCAB, 5)) == {"cold_s", "warm_s", "unshared_s"}
    assert engine.stats().prefix_hit_tokens - before >= 3 * 16, "at least all of the warm run"


@pytest.mark.parametrize(
    "row",
    [
        Decode(batch=3, context=5, output=20),
        Prefill(prompt=40),
        Throughput(requests=6, prompt=7, output=5),
        Arrivals(rate=100, requests=5, prompt=4, output=4),
    ],
)
def test_the_engine_plays_every_workload(engine, row):
    figures = measure(row, EnginePlayer(engine, Garbage()), VOCAB, 3)
    assert tuple(figures) == row.gives
    assert all(value > 0 for value in figures.values())


def test_a_step_counts_only_while_all_decode():
    early = Trace(0, [1.0, 2.0, 4.0, 5.0])
    late = Trace(0, [3.0, 4.0, 5.0, 6.0, 7.0])
    assert step_seconds([early, late]) == 1.0
    assert span([early, late]) == 7.0
    with pytest.raises(ConfigError, match="more output tokens"):
        step_seconds([early, Trace(0, [5.0, 6.0])])


def test_percentiles_are_of_requests_and_of_tokens():
    found = percentiles([Trace(0, [0.1, 0.2]), Trace(0, [0.3, 0.5, 0.9])])
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["tpot_p50_ms"] == pytest.approx(200)
    assert found["itl_p50_ms"] == pytest.approx(200)
    assert found["itl_p99_ms"] == pytest.approx(396)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_quantiles_are_those_of_the_standard_library(values):
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 50, 90, 99):
        assert quantile(values, share / 100) == pytest.approx(cuts[share - 1])


LIMITS = {"max_len": 64, "max_num_seqs": 4, "max_queue": 8}


@pytest.mark.parametrize(
    ("row", "nearest"),
    [
        (Prefill(prompt=64), "model.max_len=65"),
        (Decode(context=32, output=33), "model.max_len=65"),
        (Decode(batch=5, context=3), "scheduler.max_num_seqs=5"),
        (Throughput(requests=13, prompt=3, output=3), "scheduler.max_queue=13"),
        (SharedPrefix(requests=2, shared=30, own=30, output=5), "model.max_len=65"),
        (Arrivals(rate=1, requests=13, prompt=3, output=3), "scheduler.max_queue=13"),
    ],
)
def test_a_row_that_cannot_run_names_what_would_let_it(row, nearest):
    with pytest.raises(ConfigError) as caught:
        check_fits({"one": row}, **(LIMITS | ({"max_len": 4096} if "max_len" not in nearest else {})))
    assert caught.value.key == "bench.rows.one"
    assert caught.value.nearest == (nearest,)


def test_rows_at_their_limits_run():
    check_fits({"a": Prefill(prompt=63), "b": Decode(batch=4, context=32, output=32)}, **LIMITS)
    check_fits({"c": Throughput(requests=12, prompt=32, output=32)}, **LIMITS)
