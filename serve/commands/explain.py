"""``treadle explain``: the pipeline as it runs for this deployment, pass by pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rich.syntax import Syntax
from rich.table import Table

from treadle.conf.errors import ConfigError
from treadle.graph.machine import cuda_device
from treadle.runtime.progress import PhaseBars

if TYPE_CHECKING:
    from rich.console import Console
    from torch.fx import Node

    from treadle.graph.ir import Body
    from treadle.graph.resolve import Resolved
    from treadle.passes.prove import Prover
    from treadle.passes.runner import PassStep, Watch


@dataclass
class _Lowering:
    """What was seen of the passes that make one program of the deployment."""

    title: str
    steps: list[PassStep] = field(default_factory=list)
    prover: Prover | None = None
    is_compiled: Callable[[Body], bool] = lambda body: body.compiled is not None
    """of a body of the last step; what inline kernels are part of"""


def run(resolved: Resolved, console: Console, show: str | None = None, prove: bool = False) -> int:
    """Print every pass with its time and what it changes; ``prove`` each numerically, which needs the hardware.

    With ``show``, print instead the program before and after that pass, as Python that runs.

    Where small steps have a program of their own, its passes follow those of the other.

    For hardware of another machine bodies are not compiled, and kernels not measured.

    Raises: ConfigError if the pipeline leaves out ``show``. Returns 1 if a proof fails, else 0.
    """
    from treadle.graph.resolve import refuse_elsewhere
    from treadle.passes.compile import is_worth_compiling
    from treadle.passes.prove import ProofError, Prover
    from treadle.runtime.build import device, lowering_sizes, passes, program, weights

    if prove:
        refuse_elsewhere(resolved)
    hardware, compiles = resolved.deployment.hardware, resolved.deployment.passes.compile
    here = hardware.device == "cpu" or cuda_device() is not None
    if not here:
        resolved = _unmeasured(resolved)
    backend = device(resolved) if here else None
    sizes = lowering_sizes(resolved, backend)
    names = [each.name for size in sizes for each in passes(resolved, max_tokens=size)]
    if show is not None and show not in names:
        hint = f"it has {', '.join(dict.fromkeys(names))}"
        raise ConfigError("not a pass of this deployment's pipeline", key="--show", value=show, hint=hint)
    if not here:
        console.print(f"# no {hardware.name} here: nothing is compiled or measured", soft_wrap=True)
    lowerings: list[_Lowering] = []

    def watch(max_tokens: int | None) -> list[Watch]:
        title = "" if len(sizes) == 1 else ", any step" if max_tokens is None else f", up to {max_tokens} tokens"
        made = _Lowering(title, prover=Prover(partial(weights, resolved), resolved.spec.vocab) if prove else None)
        if not here:
            made.is_compiled = lambda body: compiles and is_worth_compiling(body, max_tokens)
        lowerings.append(made)
        return [made.steps.append, *([made.prover] if made.prover is not None else [])]

    failed = None
    with PhaseBars() as bars:
        try:
            program(resolved, backend, bars, watch)
        except ProofError as error:
            failed = error
    for each in lowerings if show is None else []:
        console.print(_passes(each))
        if each.steps:
            console.print(_kernels(each))
    for step in (step for each in lowerings for step in each.steps):
        if step.applied.name == show:
            _show(console, step)
    if failed is not None:
        console.print(f"# not proved: {failed}", style="bold red", soft_wrap=True)
    return 0 if failed is None else 1


def _unmeasured(resolved: Resolved) -> Resolved:
    deployment = resolved.deployment
    return replace(
        resolved, deployment=replace(deployment, passes=replace(deployment.passes, compile=False, measure=False))
    )


def _passes(lowering: _Lowering) -> Table:
    table = Table(title=f"passes{lowering.title}", title_justify="left")
    proofs = None if lowering.prover is None else lowering.prover.proofs
    for column in ("", "pass", "level", "time", "nodes", "weights"):
        table.add_column(column, justify="left" if column in ("pass", "level") else "right")
    if proofs is not None:
        table.add_column("error / allowed", justify="right")
    for index, step in enumerate(lowering.steps):
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


def _kernels(lowering: _Lowering) -> Table:
    graph = lowering.steps[-1].after
    table = Table(title=f"kernels{lowering.title}", title_justify="left")
    for column in ("body", "layers", "kernels"):
        table.add_column(column)
    layers = Counter(call.body for call in graph.calls)
    for name, body in graph.bodies.items():
        is_compiled = lowering.is_compiled(body)
        chosen = [_kernel(node, is_compiled) for node in body.ops if "kernel" in node.meta]
        text = ", ".join(f"{kernel} x{count}" if count > 1 else kernel for kernel, count in Counter(chosen).items())
        table.add_row(name, str(layers[name]), text)
    return table


def _kernel(node: Node, is_compiled: bool) -> str:
    """Return the name of a node's kernel; those written inline become part of a compiled body, or run as torch's."""
    from torch._ops import OpOverload

    name = str(node.meta["kernel"])
    if isinstance(node.target, OpOverload):
        return name
    return "compiled" if is_compiled else f"{name.partition('.')[0]} by torch"


def _show(console: Console, step: PassStep) -> None:
    from treadle.graph.text import graph_text

    for title, graph in (("before", step.before), ("after", step.after)):
        text = f"# {title} {step.applied!r}\n{graph_text(graph)}"
        if console.is_terminal:
            console.print(Syntax(text, "python", background_color="default", word_wrap=True))
        else:
            # Into a file or a pipe goes what Python reads: long lines stay whole.
            console.print(text, soft_wrap=True, markup=False, highlight=False)


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} -> {after}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
