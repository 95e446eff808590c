"""Apply the gated activation straight to the joined gate-and-up product, without splitting it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseActivation(Pass):
    """Needs fused projections: gate and up must be the two halves of one tensor."""

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with ``act_mul`` over two halves replaced by ``gated_activation`` over the whole."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, _: Call) -> None:
    for node in editor.find("act_mul"):
        a = arguments(node)
        whole = _halves(a["gate"], a["up"])
        if whole is None:
            continue
        with editor.before(node):
            fused = editor.op("gated_activation", whole, a["act"], label=node.name)
        editor.swap(node, fused)


def _halves(gate: Node, up: Node) -> Node | None:
    """Return the tensor of which ``gate`` is the first and ``up`` the second half, if there is one."""
    if gate.target is not operator.getitem or up.target is not operator.getitem or gate.args[0] is not up.args[0]:
        return None
    parts = gate.args[0]
    assert isinstance(parts, Node)
    if parts.target != torch.ops.aten.split_with_sizes.default or (gate.args[1], up.args[1]) != (0, 1):
        return None
    whole, sizes = parts.args[0], parts.args[1]
    assert isinstance(whole, Node)
    assert isinstance(sizes, list | tuple)
    return whole if len(sizes) == 2 and sizes[0] == sizes[1] else None
