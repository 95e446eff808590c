"""Runs a pipeline: checks each level's promises after every pass and hands each step to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.graph.ir import Graph
from treadle.graph.verify import verify
from treadle.passes.base import Pass


@dataclass(frozen=True, kw_only=True)
class PassStep:
    """One pass as it was applied."""

    number: int
    applied: Pass
    before: Graph
    after: Graph
    seconds: float


Watch = Callable[[PassStep], None]


def run_passes(passes: Sequence[Pass], graph: Graph, watchers: Sequence[Watch] = ()) -> Graph:
    """Return the graph after all passes.

    Raises: GraphError naming the pass whose result breaks a promise of its level; whatever a watcher raises.
    """
    verify(graph)
    for number, applied in enumerate(passes, 1):
        assert graph.level is applied.level, f"{applied.name} takes a graph at level {applied.level.value}"
        started = time.perf_counter()
        after = applied(graph)
        seconds = time.perf_counter() - started
        try:
            verify(after)
        except AssertionError as error:
            error.add_note(f"after pass {number}, {applied!r}")
            raise
        step = PassStep(number=number, applied=applied, before=graph, after=after, seconds=seconds)
        for watch in watchers:
            watch(step)
        graph = after
    return graph
