"""Let the product that ends a sublayer add itself to the residual stream. Pays where products have few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseLinearAdd(Pass):
    """The product never exists in memory. Works on sums of which one part is a product that nothing else reads."""

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with such products and sums joined."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, _: Call) -> None:
    for add in editor.find("add"):
        a = arguments(add)
        if _only_for(add, a["b"]):
            product, residual, alpha, beta = a["b"], a["a"], a["alpha"], a["beta"]
        elif _only_for(add, a["a"]):
            product, residual, alpha, beta = a["a"], a["b"], a["beta"], a["alpha"]
        else:
            continue
        p = arguments(product)
        with editor.before(add):
            fused = editor.op("linear_add", p["x"], p["weight"], p["bias"], residual, alpha, beta, label=add.name)
        editor.swap(add, fused)


def _only_for(add: Node, part: Any) -> bool:
    """Return whether ``part`` of the sum is a product that only the sum reads, and reads once."""
    a = arguments(add)
    return a["a"] is not a["b"] and part.target == ops.op("linear") and list(part.users) == [add]
