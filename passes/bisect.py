"""Finds where a program parts from what it should compute: the first pass that moves the logits, then the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from treadle.graph.ir import Call, Graph, Role, role
from treadle.graph.program import StepInputs
from treadle.passes.base import Pass
from treadle.passes.prove import LoadWeights, allowed, evaluate, row_error
from treadle.passes.runner import PassStep, run_passes
from treadle.passes.sample import Sample, distinct_calls, draw


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Where two programs part."""

    applied: Pass
    error: float
    """distance of the logits, relative to their size"""
    body: str | None
    """None: no single node shows it"""
    node: str | None
    kernel: str | None
    node_error: float


class _Found(Exception):
    def __init__(self, culprit: Culprit) -> None:
        self.culprit = culprit


def bisect(passes: Sequence[Pass], graph: Graph, load: LoadWeights, vocab: int, seed: int = 0) -> Culprit | None:
    """Return the first pass, and node in it, after which the program differs; None if the pipeline is sound."""
    sample = draw(graph, vocab, seed)

    def watch(step: PassStep) -> None:
        exact, got = (evaluate(each, load, sample) for each in (step.before, step.after))
        error = row_error(exact, got)
        if not error <= allowed(step.applied, step.after):
            raise _Found(_locate(step, error, load, sample))

    try:
        run_passes(passes, graph, [watch])
    except _Found as found:
        return found.culprit
    return None


def _locate(step: PassStep, error: float, load: LoadWeights, sample: Sample) -> Culprit:
    before, after = distinct_calls(step.before), distinct_calls(step.after)
    exact = _Recorder(before, load, sample).run()
    got = _Recorder(after, load, sample).run()
    limit = allowed(step.applied, after)
    for (body, origin), (value, node) in got.items():
        if (body, origin) not in exact:
            continue
        reference = exact[body, origin][0]
        distance = row_error(reference, value) if reference.shape == value.shape else float("inf")
        if not distance <= limit:
            kernel = node.meta.get("kernel")
            return Culprit(
                applied=step.applied, error=error, body=body, node=origin, kernel=kernel, node_error=distance
            )
    return Culprit(applied=step.applied, error=error, body=None, node=None, kernel=None, node_error=0.0)


Recorded = dict[tuple[str, str], tuple[Tensor, Node]]


class _Recorder:
    """Runs a graph op by op and keeps every tensor under (body, origin), in the order of computation."""

    def __init__(self, graph: Graph, load: LoadWeights, sample: Sample) -> None:
        self.graph, self.inputs = graph, sample.inputs
        self.weights = load(graph.weights)
        self.memory = sample.memory(graph)

    def run(self) -> Recorded:
        """Compute the graph on the sample and return every tensor on the way."""
        streams: dict[str, Tensor] = {}
        recorded: Recorded = {}
        for call in self.graph.calls:
            body = self.graph.bodies[call.body]
            values = [self._argument(node, call, streams) for node in body.placeholders]
            interpreter = _Keeping(GraphModule(torch.nn.Module(), body.graph), call.body, recorded)
            with torch.no_grad():
                streams.update(zip(body.outputs, interpreter.run(*values)))
        return recorded

    def _argument(self, node: Node, call: Call, streams: dict[str, Tensor]) -> Any:
        match role(node):
            case Role.STREAM:
                return streams[node.name]
            case Role.STEP if node.name == "page_table":
                return self.inputs.page_tables[call.group]
            case Role.STEP:
                return self.inputs[StepInputs._fields.index(node.name)]
            case Role.WEIGHT:
                return self.weights[call.weights[node.name]]
            case Role.STATE:
                assert not isinstance(self.memory, Tensor)
                return self.memory[call.states[node.name]]
            case Role.ARENA:
                return self.memory


class _Keeping(Interpreter):
    def __init__(self, module: GraphModule, body: str, recorded: Recorded) -> None:
        super().__init__(module)
        self._body, self._recorded = body, recorded

    def run_node(self, n: Node) -> Any:
        """Compute a node as usual and keep what it gives."""
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            self._recorded[self._body, n.meta["origin"]] = (value.clone(), n)
        return value
