"""``treadle explain``: the pipeline as it runs for this deployment, pass by pass."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from rich.syntax import Syntax
from rich.table import Table

from treadle.conf.errors import ConfigError, nearest
from treadle.runtime.progress import PhaseBars

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.ir import Graph
    from treadle.graph.resolve import Resolved
    from treadle.passes.prove import Proof
    from treadle.passes.runner import PassStep


def run(resolved: Resolved, console: Console, show: str | None = None, prove: bool = False) -> int:
    """Print every pass with its time and what it changes; ``show`` one as Python; ``prove`` each numerically.

    Raises: ConfigError if no pass is called ``show``. Returns 1 if a proof fails, else 0.
    """
    from treadle.passes.prove import ProofError, Prover
    from treadle.runtime.build import lower, passes, weights

    names = [each.name for each in passes(resolved)]
    if show is not None and show not in names:
        raise ConfigError("no such pass in this pipeline", key="--show", value=show, nearest=nearest(show, names))
    steps: list[PassStep] = []
    prover = Prover(partial(weights, resolved), resolved.spec.vocab) if prove else None
    failed = None
    with PhaseBars() as bars:
        try:
            lower(resolved, bars, [steps.append, *([prover] if prover is not None else [])])
        except ProofError as error:
            failed = error
    console.print(_passes(steps, prover.proofs if prover is not None else None))
    if steps:
        console.print(_kernels(steps[-1].after))
    for step in steps:
        if step.applied.name == show:
            _show(console, step)
    if failed is not None:
        console.print(f"[bold red]not proved:[/] {failed}")
    return 0 if failed is None else 1


def _passes(steps: list[PassStep], proofs: list[Proof] | None) -> Table:
    table = Table(title="passes", title_justify="left")
    for column in ("", "pass", "level", "time", "nodes", "weights"):
        table.add_column(column, justify="left" if column in ("pass", "level") else "right")
    if proofs is not None:
        table.add_column("error / allowed", justify="right")
    for index, step in enumerate(steps):
        before, after = step.before, step.after
        row = [
            str(step.number),
            step.applied.name,
            after.level.value,
            f"{step.seconds * 1e3:.0f} ms",
            _change(str(before.num_nodes), str(after.num_nodes)),
            _change(_megabytes(before.weight_bytes), _megabytes(after.weight_bytes)),
        ]
        if proofs is not None:
            row.append(f"{proofs[index].error:.1e} / {proofs[index].allowed:.1e}" if index < len(proofs) else "failed")
        table.add_row(*row)
    return table


def _kernels(graph: Graph) -> Table:
    table = Table(title="kernels", title_justify="left")
    for column in ("body", "layers", "kernels"):
        table.add_column(column)
    layers = Counter(call.body for call in graph.calls)
    for name, body in graph.bodies.items():
        chosen = [str(node.meta["kernel"]) for node in body.ops if "kernel" in node.meta]
        text = ", ".join(f"{kernel} x{count}" if count > 1 else kernel for kernel, count in Counter(chosen).items())
        table.add_row(name, str(layers[name]), text)
    return table


def _show(console: Console, step: PassStep) -> None:
    from treadle.graph.text import graph_text

    for title, graph in (("before", step.before), ("after", step.after)):
        console.rule(f"{title} {step.applied!r}", align="left")
        console.print(Syntax(graph_text(graph), "python", background_color="default", word_wrap=True))


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} -> {after}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
