"""What a pass is, and the editor with which a pass rewrites a body without touching the one it was given."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from treadle.graph import ops
from treadle.graph.body import BodyWriter
from treadle.graph.ir import Body, Call, Graph, Level, Role, Shapes, role
from treadle.graph.weights import WeightExpr

Binding = Callable[[Mapping[str, WeightExpr]], WeightExpr]
"""Makes a new weight from the ones the call had before."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pure rewrite of the graph. Its repr is its log line and, with the graph's text, its cache key."""

    level: ClassVar[Level]
    """the level it takes"""
    tolerance: ClassVar[float] = 0.0
    """how far, relative to the spread of the exact result, a lossy pass may move it; 0 = rounding only"""

    @property
    def name(self) -> str:
        """The pass's name in configuration: its class name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def __call__(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the argument stays as it was."""
        raise NotImplementedError


class BodyEditor(BodyWriter):
    """A private copy of a body, and the rules that bind the weights it gains."""

    def __init__(self, body: Body, shapes: Shapes) -> None:
        graph = FxGraph()
        self.body = body
        self._result = graph.graph_copy(body.graph, {})
        super().__init__(shapes, graph)
        graph.output(self._result)
        self._rules: dict[str, Binding] = {}

    def find(self, *names: str) -> list[Node]:
        """Return the calls of the semantic ops ``names``, in order."""
        targets = {ops.op(name) for name in names}
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in targets]

    def before(self, node: Node) -> Any:
        """Return a context in which new calls are put in front of ``node``."""
        return self.graph.inserting_before(node)

    def weight(self, name: str, like: WeightExpr, rule: Binding) -> Node:
        """Return a new weight input of the type of ``like``; every call of the body binds it by ``rule``."""
        self._rules[name] = rule
        return self.input(name, Role.WEIGHT, like.shape, getattr(torch, like.dtype))

    def swap(self, old: Node, new: Node) -> None:
        """Let ``new`` stand wherever ``old`` was used, then drop ``old``."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def finish_edit(self) -> tuple[Body, Callable[[Call], Call]]:
        """Return the new body, without dead nodes, and how a call of the old body becomes one of the new."""
        drop_dead(self.graph)
        body = replace(self.body, graph=renamed(self.graph))
        body.graph.lint()
        weights = [node.name for node in body.placeholders if role(node) is Role.WEIGHT]

        def rebind(call: Call) -> Call:
            rules = self._rules
            bound = {name: rules[name](call.weights) if name in rules else call.weights[name] for name in weights}
            return replace(call, weights=bound)

        return body, rebind


def drop_dead(graph: FxGraph) -> None:
    """Remove calls whose result nobody reads, unless they write state, and inputs that nothing reads."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output" or (node.op == "call_function" and writes_state(node)):
            continue
        graph.erase_node(node)


def renamed(graph: FxGraph) -> FxGraph:
    """Return a copy in which calls have the names they were first written with, not those of a replacement."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.name = node.meta["origin"]
    copy = FxGraph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def writes_state(node: Node) -> bool:
    """Return whether a call changes one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def rewrite(graph: Graph, edit: Callable[[BodyEditor, Call], None], level: Level | None = None) -> Graph:
    """Return ``graph`` with every distinct body edited once; ``edit`` also gets the body's first call.

    The first call shows the weight expressions; those of the body's other calls have the same types.
    """
    bodies: dict[str, Body] = {}
    rebinds: dict[str, Callable[[Call], Call]] = {}
    for name, body in graph.bodies.items():
        editor = BodyEditor(body, graph.shapes)
        edit(editor, next(call for call in graph.calls if call.body == name))
        bodies[name], rebinds[name] = editor.finish_edit()
    return graph.replace_bodies(bodies, tuple(rebinds[call.body](call) for call in graph.calls), level)


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a semantic op's call by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args))
    given.update(node.kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments}


def results(node: Node) -> dict[int, Node]:
    """Return the getitem nodes that pick the results of a call that returns several."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def as_node(argument: object) -> Node:
    """Return an argument that is known to be the result of another node."""
    assert isinstance(argument, Node)
    return argument
