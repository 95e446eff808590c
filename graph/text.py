"""A body as runnable Python, for reading, comparing and executing: one line a node, with types and provenance."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from treadle.graph.ir import Body, Call, Graph, role

HEADER = "import torch\n\nop = torch.ops.treadle\naten = torch.ops.aten\n"


def body_text(body: Body, graph: Graph) -> str:
    """Return a Python function that computes what ``body`` does, given its placeholders in order."""
    lines = [f"def {body.name}("]
    for node in body.placeholders:
        lines.append(f"    {node.name},  # {graph.shapes.describe(node.meta['val'])} {role(node).value}")
    lines.append("):")
    for node in body.ops:
        left = "" if node.meta["val"] is None else f"{node.name} = "
        lines.append(f"    {left}{_call(node)}{_comment(node, graph)}")
    returned = ", ".join(str(value) for value in body.graph.output_node().args[0])  # type: ignore[union-attr]
    lines.append(f"    return ({returned},)  # {', '.join(body.outputs)}")
    return "\n".join(lines) + "\n"


def graph_text(graph: Graph) -> str:
    """Return all bodies as one Python module, and the layer table as its comment."""
    rows = [f"#   {row}" for row in _calls(graph)]
    bodies = "\n\n".join(body_text(body, graph) for body in graph.bodies.values())
    kernels = sorted({_module(node) for body in graph.bodies.values() for node in body.ops if _is_function(node)})
    imports = "".join(f"import {module}\n" for module in kernels)
    return f"# level {graph.level.value}; calls in order:\n" + "\n".join(rows) + f"\n{HEADER}{imports}\n\n{bodies}"


def _calls(graph: Graph) -> Iterator[str]:
    """Yield the calls in order, neighbouring layers that are alike together."""

    def run(place: tuple[int, Call]) -> tuple[str, int | None]:
        index, call = place
        return call.body, None if call.layer is None else call.layer - index

    for (body, _), places in groupby(enumerate(graph.calls), run):
        layers = [call.layer for _, call in places]
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        yield body if layers[0] is None else f"{where}: {body}"


def _call(node: Node) -> str:
    arguments = [_literal(argument) for argument in node.args]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [f"{name}={_literal(value)}" for name, value in node.kwargs.items()]
    return f"{_target(node)}({', '.join(arguments)})"


def _target(node: Node) -> str:
    name = str(node.target)
    if _is_function(node):
        return f"{_module(node)}.{node.target.__name__}"  # type: ignore[union-attr]
    namespace, op, *overload = name.split(".")
    overload = [part for part in overload if part != "default"]
    prefix = {"treadle": "op", "aten": "aten"}.get(namespace, f"torch.ops.{namespace}")
    return ".".join([prefix, op, *overload])


def _is_function(node: Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem


def _module(node: Node) -> str:
    return str(getattr(node.target, "__module__", ""))


def _comment(node: Node, graph: Graph) -> str:
    value = node.meta["val"]
    types = [value] if isinstance(value, torch.Tensor) else list(value or ())
    text = ", ".join(graph.shapes.describe(each) for each in types)
    kernel = f" by {node.meta['kernel']}" if "kernel" in node.meta else ""
    return f"  # {text}{kernel}" if text or kernel else ""


def _literal(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(each) for each in value) + "]"
    return str(value) if isinstance(value, (Node, torch.dtype)) else repr(value)
