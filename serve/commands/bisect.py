"""``treadle bisect``: the first pass, and in it the first node, that computes something else than the model says."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from treadle.runtime.progress import PhaseBars

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(resolved: Resolved, console: Console) -> int:
    """Print the culprit and return 1, or that there is none and return 0."""
    from treadle.passes.bisect import bisect
    from treadle.runtime.build import model_graph, passes, weights

    with PhaseBars() as bars:
        culprit = bisect(passes(resolved, bars), model_graph(resolved), partial(weights, resolved), resolved.spec.vocab)
    if culprit is None:
        console.print("every pass agrees with the graph before it, on sampled inputs")
        return 0
    console.print(f"pass [bold]{culprit.applied.name}[/] moves the logits by {culprit.error:.2e} of their size")
    if culprit.node is None:
        console.print("no single node shows it; treadle explain --show prints the pass before and after")
    else:
        kernel = f", kernel [bold]{culprit.kernel}[/]" if culprit.kernel else ""
        console.print(
            f"first node that differs: [bold]{culprit.body}.{culprit.node}[/]{kernel}, by {culprit.node_error:.2e}"
        )
    return 1
