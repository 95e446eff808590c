"""Join linear layers that read the same input into one (q, k, v; gate and up), with their results as views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import Node

from treadle.graph.ir import Call, Graph, Level, Role, role
from treadle.graph.weights import Concat, Int8, WeightExpr
from treadle.passes.base import BodyEditor, Pass, as_node, rewrite

# which arguments of each op hold weights whose rows are the outputs
WEIGHT_ARGUMENTS = {"linear": (1, 2), "linear_int8": (1, 2, 3)}


def _joined(names: tuple[str, ...], weights: Mapping[str, WeightExpr]) -> WeightExpr:
    parts = tuple(weights[name] for name in names)
    first = parts[0]
    if isinstance(first, Int8):
        # rows quantise apart: the quantised join is the join of the quantised, and values and scales load as one pair
        whole = Concat(tuple(part.part for part in parts if isinstance(part, Int8)), 0)
        return Int8(whole, first.group, first.what)
    return Concat(parts, 0)


@dataclass(frozen=True, kw_only=True)
class FuseProjections(Pass):
    """One matrix product instead of several over the same rows; each output element is computed as before."""

    level = Level.MODEL

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with joined projections."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, call: Call) -> None:
    for op, weight_arguments in WEIGHT_ARGUMENTS.items():
        groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
        for node in editor.find(op):
            if all(_is_weight(node.args[i]) for i in weight_arguments if i < len(node.args)):
                groups[_signature(node, weight_arguments)].append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                _join(editor, call, nodes, weight_arguments)


def _is_weight(argument: object) -> bool:
    return argument is None or (
        isinstance(argument, Node) and argument.op == "placeholder" and role(argument) is Role.WEIGHT
    )


def _signature(node: Node, weight_arguments: tuple[int, ...]) -> tuple[object, ...]:
    """What has to be equal for two products to be one: input, other arguments, which weights there are."""
    return tuple((argument is None) if i in weight_arguments else argument for i, argument in enumerate(node.args))


def _join(editor: BodyEditor, call: Call, nodes: list[Node], weight_arguments: tuple[int, ...]) -> None:
    first = nodes[0]
    arguments = list(first.args)
    label = "_".join(dict.fromkeys(node.name for node in nodes))
    for i in weight_arguments:
        if i >= len(arguments) or arguments[i] is None:
            continue
        names = tuple(as_node(node.args[i]).name for node in nodes)
        rule = partial(_joined, names)
        arguments[i] = editor.weight("__".join(names), rule(call.weights), rule)
    sizes = [int(node.meta["val"].shape[-1]) for node in nodes]
    with editor.before(first):
        joined = editor.call(first.target, *arguments, label=label, **first.kwargs)  # type: ignore[arg-type]
        parts = editor.call(torch.ops.aten.split_with_sizes.default, joined, sizes, -1, label=f"{label}_parts")
        items = [editor.item(parts, i, label=node.name) for i, node in enumerate(nodes)]
    for node, item in zip(nodes, items):
        editor.swap(node, item)
