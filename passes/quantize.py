"""Weight-only int8 for linear layers: a quarter of fp32's bytes to read for every token decoded.

w is near weight * scale, with one scale for every ``group`` values along the input; activations stay as they are.
A table that is both embedding and head is stored once, in int8, and read by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.fx import Node

from treadle.graph import ops
from treadle.graph.footprint import INT8_GROUP
from treadle.graph.ir import Call, Graph, Level
from treadle.graph.weights import Int8, WeightExpr
from treadle.passes.base import BodyEditor, Pass, arguments, as_node, rewrite

Part = Literal["weight", "scale"]
CHOICES = ("route", "hash_route", "index_select", "compressed_attention")
"""Ops that choose by what a linear layer gives them; one that reads anything else of one reads it through other ops."""


def _quantized(name: str, group: int, what: Part, weights: Mapping[str, WeightExpr]) -> WeightExpr:
    return Int8(weights[name], group, what)


@dataclass(frozen=True, kw_only=True)
class Quantize(Pass):
    """Replaces every linear layer and expert whose input is whole groups, and the embedding that shares the head.

    Routers stay as they are: what they choose is all or nothing.
    """

    level = Level.MODEL
    tolerance = 0.05
    group: int = INT8_GROUP
    experts: bool = True
    """whether experts become int8 too: no GPU has a kernel for such"""

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with int8 weights."""
        linear = {
            call.weights[name]
            for call in graph.calls
            for name in _linear_weights(graph, call.body)
            if name in call.weights
        }

        def edit(editor: BodyEditor, call: Call) -> None:
            _edit_linear(editor, call, self.group)
            _edit_embed(editor, call, self.group, linear)
            if self.experts:
                _edit_experts(editor, call, self.group)

        return rewrite(graph, edit)


def _linear_weights(graph: Graph, body: str) -> list[str]:
    target = torch.ops.treadle.linear.default
    return [as_node(node.args[1]).name for node in graph.bodies[body].ops if node.target == target]


def _edit_linear(editor: BodyEditor, call: Call, group: int) -> None:
    for node in editor.find("linear"):
        a = arguments(node)
        name = a["weight"].name
        if call.weights[name].shape[-1] % group or _routes(node):
            continue
        weight, scale = _pair(editor, call, name, group)
        with editor.before(node):
            x, bias = a["x"], a["bias"]
            if "logits" in editor.body.outputs:
                x, bias = _widened(editor, x), _widened(editor, bias)
            new = editor.op("linear_int8", x, weight, scale, bias, group, label=node.name)
        editor.swap(node, new)


def _routes(node: Node) -> bool:
    """Return whether the results are what experts, or the keys of an attention, are chosen by."""
    choosers = {ops.op(name) for name in CHOICES}
    return any(user.target in choosers for user in node.users)


def _edit_experts(editor: BodyEditor, call: Call, group: int) -> None:
    for node in editor.find("experts"):
        a = arguments(node)
        names = (a["up"].name, a["down"].name)
        if any(call.weights[name].shape[-1] % group for name in names):
            continue
        (up, up_scale), (down, down_scale) = (_pair(editor, call, name, group) for name in names)
        rest = [a[name] for name in list(a)[list(a).index("act") :]]
        with editor.before(node):
            new = editor.op(
                "experts_int8", a["x"], a["weights"], a["ids"], up, up_scale, a["up_bias"], down, down_scale,
                a["down_bias"], group, *rest, label=node.name,
            )  # fmt: skip
        editor.swap(node, new)


def _widened(editor: BodyEditor, value: Node | None) -> Node | None:
    """Return ``value`` in float32, in which the product then is: rounded to 16 bits, logits tie too often."""
    if value is None or value.meta["val"].dtype == torch.float32:
        return value
    return editor.call(torch.ops.aten._to_copy.default, value, dtype=torch.float32, label=f"{value.name}_wide")


def _edit_embed(editor: BodyEditor, call: Call, group: int, linear: set[WeightExpr]) -> None:
    for node in editor.find("embed"):
        a = arguments(node)
        name = a["weight"].name
        if call.weights[name] not in linear or call.weights[name].shape[-1] % group:
            continue
        weight, scale = _pair(editor, call, name, group)
        with editor.before(node):
            dtype = node.meta["val"].dtype
            new = editor.op("embed_int8", a["ids"], weight, scale, dtype, group, a["scale"], label=node.name)
        editor.swap(node, new)


def _pair(editor: BodyEditor, call: Call, name: str, group: int) -> tuple[torch.fx.Node, torch.fx.Node]:
    made = []
    suffixes: dict[Part, str] = {"weight": "q", "scale": "s"}
    for what, suffix in suffixes.items():
        rule = partial(_quantized, name, group, what)
        made.append(editor.weight(f"{name}_{suffix}", rule(call.weights), rule))
    return made[0], made[1]
