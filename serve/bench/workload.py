"""From a row of a recipe to one measurement of it: prompts, played, and the figures of their traces."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import cast

from treadle.conf.errors import ConfigError
from treadle.conf.recipe import (
    Arrivals,
    Decode,
    Prefill,
    Returning,
    Row,
    Sessions,
    SharedPrefix,
    Start,
    Throughput,
)
from treadle.serve.bench.play import CountingPlayer, Player, Trace
from treadle.serve.bench.quantiles import quantile
from treadle.serve.bench.sessions import measure_return, measure_sessions

Prompts = list[list[int]]


def measure(row: Row, player: Player, vocab: int, seed: int) -> dict[str, float]:
    """Return the figures of one trial. Equal seeds give equal prompts; different ones share no beginning."""
    draw = random.Random(seed)

    def prompts(count: int, length: int, begin: Sequence[int] = ()) -> Prompts:
        return [[*begin, *draw.choices(range(vocab), k=length)] for _ in range(count)]

    match row:
        case Prefill():
            ttft_s = player.play(prompts(1, row.prompt), 1)[0].ttft_s
            return {"ttft_ms": ttft_s * 1e3, "prompt_tok_s": row.prompt / ttft_s}
        case Decode():
            batch = prompts(row.batch, row.context)
            # Their keys and values first: with those in the prefix cache, all decode together almost at once.
            player.play(batch, 1)
            step_s = step_seconds(player.play(batch, row.output))
            return {"tpot_ms": step_s * 1e3, "output_tok_s": row.batch / step_s}
        case Throughput():
            total_s = span(player.play(prompts(row.requests, row.prompt), row.output))
            return {"output_tok_s": row.requests * row.output / total_s, "total_s": total_s}
        case SharedPrefix():
            begin = prompts(1, row.shared)[0]
            return {
                "cold_s": span(player.play(prompts(row.requests, row.own, begin), row.output)),
                "warm_s": span(player.play(prompts(row.requests, row.own, begin), row.output)),
                "unshared_s": span(player.play(prompts(row.requests, row.shared + row.own), row.output)),
            }
        case Arrivals():
            at_s = [0.0]
            while len(at_s) < row.requests:
                at_s.append(at_s[-1] + draw.expovariate(row.rate))
            return percentiles(player.play(prompts(row.requests, row.prompt), row.output, at_s))
        case Sessions():
            return measure_sessions(row, counting(player), vocab, draw)
        case Returning():
            return measure_return(row, counting(player), vocab, draw)
        case Start():
            raise AssertionError("a start is measured on a process of its own")


def counting(player: Player) -> CountingPlayer:
    """Return a player that says what it computed; rows that need it are played on treadle alone."""
    assert hasattr(player, "computed_tokens"), "rivals do not say what they compute"
    return cast(CountingPlayer, player)


def span(traces: Sequence[Trace]) -> float:
    """Return the seconds from the first arrival to the last token."""
    return max(trace.token_s[-1] for trace in traces) - min(trace.arrival_s for trace in traces)


def step_seconds(traces: Sequence[Trace]) -> float:
    """Return the mean seconds of a step in which every request decodes.

    Raises ConfigError if the first request ends before the last has two tokens: then there is no such step.
    """
    end_s = min(trace.token_s[-1] for trace in traces)
    latest = max(traces, key=lambda trace: trace.token_s[0])
    inside = [at_s for at_s in latest.token_s if at_s <= end_s]
    if len(inside) < 2:
        raise ConfigError(
            "the first request ends before the last one decodes",
            key="output",
            hint="more output tokens, or a smaller batch",
        )
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def percentiles(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile of TTFT, TPOT and ITL in milliseconds."""
    values = {
        "ttft": [trace.ttft_s for trace in traces],
        "tpot": [trace.tpot_s for trace in traces],
        "itl": [gap for trace in traces for gap in trace.itl_s],
    }
    return {
        f"{what}_p{share}_ms": quantile(found, share / 100) * 1e3
        for what, found in values.items()
        for share in (50, 90, 99)
    }


def check_fits(rows: Mapping[str, Row], *, max_len: int, max_num_seqs: int, max_queue: int) -> None:
    """Raise ConfigError for the first row that the deployment cannot run as it is meant, naming what would let it."""
    for name, row in rows.items():
        together, length = needs(row)
        if length > max_len:
            raise ConfigError(
                f"{length} tokens of a sequence do not fit in model.max_len={max_len}",
                key=f"bench.rows.{name}",
                nearest=[f"model.max_len={length}"],
            )
        if isinstance(row, Decode) and together > max_num_seqs:
            raise ConfigError(
                f"{together} sequences cannot decode together with scheduler.max_num_seqs={max_num_seqs}",
                key=f"bench.rows.{name}",
                nearest=[f"scheduler.max_num_seqs={together}"],
            )
        if together > max_num_seqs + max_queue:
            raise ConfigError(
                f"{together} requests do not fit in the queue",
                key=f"bench.rows.{name}",
                nearest=[f"scheduler.max_queue={together}"],
            )


def needs(row: Row) -> tuple[int, int]:
    """Return how many requests there may be at once, and the tokens of one."""
    match row:
        case Prefill() | Start():
            return 1, row.prompt + 1
        case Decode():
            return row.batch, row.context + row.output
        case Throughput() | Arrivals():
            return row.requests, row.prompt + row.output
        case SharedPrefix():
            return row.requests, row.shared + row.own + row.output
        case Sessions():
            return row.parallel, row.length
        case Returning():
            return 1, row.context + row.user + 4
