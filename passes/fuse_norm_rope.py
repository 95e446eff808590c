"""Join the per-head norms of queries and keys with the rotation and the cache write that follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseNormRope(Pass):
    """Every head is read once between the projections and the attention. Pays where one kernel does all of it."""

    level = Level.SHARDED
    makes: ClassVar[str] = "norm_rope_cache_write"

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with norms joined where queries and keys are normed alike, and nothing else reads them."""
        return rewrite(graph, _edit)


def _edit(editor: BodyEditor, _: Call) -> None:
    for write in editor.find("rope_cache_write"):
        w = arguments(write)
        q, k = _norm(w.pop("q"), write), _norm(w.pop("k"), write)
        if q is None or k is None or any(q[name] != k[name] for name in ("kind", "eps", "plus_one", "cast")):
            continue
        with editor.before(write):
            fused = editor.op(
                FuseNormRope.makes, q["x"], k["x"], w.pop("v"), q["weight"], k["weight"], *w.values(), q["kind"],
                q["eps"], q["plus_one"], q["cast"], label=write.name,
            )  # fmt: skip
        editor.swap(write, fused)


def _norm(part: Any, write: Node) -> dict[str, Any] | None:
    """Return the arguments of the norm that makes ``part`` for ``write`` alone; None if there is no such norm."""
    if part.target != ops.op("norm") or list(part.users) != [write]:
        return None
    n = arguments(part)
    weight = n["weight"]
    per_head = weight is None or weight.meta["val"].ndim <= 2
    return n if n["bias"] is None and n["groups"] == 1 and per_head else None
