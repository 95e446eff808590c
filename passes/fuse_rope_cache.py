"""Rotate the query, rotate the key and store key and value in one pass over them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.passes.base import BodyEditor, Pass, arguments, as_node, rewrite


@dataclass(frozen=True, kw_only=True)
class FuseRopeCache(Pass):
    """The rotated key never exists outside the cache."""

    level = Level.SHARDED

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with rope and cache write joined where q and k are rotated alike."""
        return rewrite(graph, _edit)


READERS = ("paged_attention", "paged_relative_attention", "paged_block_attention")


def _edit(editor: BodyEditor, _: Call) -> None:
    for write in editor.find("cache_write"):
        w = arguments(write)
        attention = _reader(write)
        q_rope, k_rope = as_node(attention.args[0]), w["k"]
        if not (_is_rope(q_rope) and _is_rope(k_rope)):
            continue
        q, k = arguments(q_rope), arguments(k_rope)
        alike = all(
            q[name] is k[name] or q[name] == k[name] for name in ("positions", "table", "layout", "at", "inverse")
        )
        if not alike or q["inverse"] or len(q_rope.users) > 1 or len(k_rope.users) > 1:
            continue
        with editor.before(write):
            rotated = editor.op(
                "rope_cache_write", q["x"], k["x"], w["v"], q["table"], w["arena"], w["page_table"], w["seq_ids"],
                w["positions"], w["layer_offset"], w["page_tokens"], q["layout"], q["at"], label=q_rope.name,
            )  # fmt: skip
        editor.graph.erase_node(write)
        editor.swap(q_rope, rotated)


def _reader(write: Node) -> Node:
    """Return the attention that reads what ``write`` stores: the next one in the body. Its first input are queries."""
    readers = {ops.op(name) for name in READERS}
    node = write.next
    while node.target not in readers:
        assert node.op != "output", f"nothing reads what {write.name} stores"
        node = node.next
    return node


def _is_rope(node: Node) -> bool:
    return node.target == ops.op("rope")
