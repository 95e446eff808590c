"""Passes that are wrong on purpose: what provers and bisection have to catch."""

from dataclasses import dataclass

from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, rewrite


@dataclass(frozen=True, kw_only=True)
class SwapGateAndUp(Pass):
    """Wrong: the activation is applied to the other half."""

    level = Level.MODEL

    def __call__(self, graph: Graph) -> Graph:
        def edit(editor: BodyEditor, _: Call) -> None:
            for node in editor.find("act_mul"):
                gate, up, act = node.args
                node.args = (up, gate, act)

        return rewrite(graph, edit)


@dataclass(frozen=True, kw_only=True)
class WidenWindow(Pass):
    """Wrong: one token too many in the window, which only long histories show."""

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        def edit(editor: BodyEditor, _: Call) -> None:
            for node in editor.find("paged_attention"):
                args = list(node.args)
                args[11] += 1 if args[11] else 0
                node.args = tuple(args)

        return rewrite(graph, edit)
