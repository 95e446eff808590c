"""Join a residual add and the norm that reads its sum."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseAddNorm(Pass):
    """The sum is read once from memory instead of twice."""

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with add and norm joined where the norm reads the add's result."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, _: Call) -> None:
    for add in editor.find("add"):
        norm = next((user for user in add.users if user.target == ops.op("norm") and user.args[0] is add), None)
        if norm is None:
            continue
        a, n = arguments(add), arguments(norm)
        n.pop("x")
        weight, bias = n.pop("weight"), n.pop("bias")
        # in front of the add, so that every reader of the sum comes later; a norm's weights are inputs of the body
        with editor.before(add):
            both = editor.op(
                "add_norm", a["a"], a["b"], weight, bias, a["alpha"], a["beta"], *n.values(), label=f"{add.name}_norm"
            )
            total, normed = editor.item(both, 0, label=add.name), editor.item(both, 1, label=norm.name)
        editor.swap(norm, normed)
        editor.swap(add, total)
