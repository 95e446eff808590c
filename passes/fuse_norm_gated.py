"""Join the norm, the product and the activation that open a gated MLP. Pays where products have few rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseNormGated(Pass):
    """Every program norms its rows again, so that the normed rows and the product never exist in memory.

    Needs fused activations. Stands before fuse_add_norm, which would take the norm.
    """

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a norm, the one product that reads it and its gated activation joined."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, _: Call) -> None:
    for gated in editor.find("gated_activation"):
        product = arguments(gated)["x"]
        if not _is_only(product, "linear", gated):
            continue
        p = arguments(product)
        norm = p["x"]
        if not _is_only(norm, "norm", product):
            continue
        n = arguments(norm)
        with editor.before(gated):
            fused = editor.op(
                "norm_gated_linear", n["x"], n["weight"], n["bias"], n["kind"], n["eps"], n["plus_one"], n["groups"],
                n["cast"], p["weight"], p["bias"], arguments(gated)["act"], label=gated.name,
            )  # fmt: skip
        editor.swap(gated, fused)


def _is_only(node: Node, name: str, reader: Node) -> bool:
    """Return whether ``node`` calls the op ``name`` and only ``reader`` reads the result."""
    return node.target == ops.op(name) and list(node.users) == [reader]
