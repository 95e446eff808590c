"""Move what layers keep into the arena: dense attention becomes a cache write and attention over pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from treadle.graph.ir import Call, Graph, Level, Role, role
from treadle.graph.layer_writer import offset_name
from treadle.graph.weights import Ints
from treadle.passes.base import BodyEditor, Pass, arguments, as_node, rewrite


@dataclass(frozen=True, kw_only=True)
class PlaceState(Pass):
    """Bodies then take the arena as one byte tensor, and where each state lies in a page or block as a small constant.

    Ops on a part of the block stay as they are: they take the arena in place of their part's own bytes.
    """

    level = Level.MODEL

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph of one rank, its state in the arena."""
        placed = tuple(_offsets(graph, call) for call in graph.calls)
        page_tokens = graph.state.page_tokens

        def edit(editor: BodyEditor, call: Call) -> None:
            _edit(editor, call, page_tokens)

        return rewrite(graph.replace_bodies(graph.bodies, placed), edit, Level.SHARDED)


def _offsets(graph: Graph, call: Call) -> Call:
    offsets = {offset_name(name): Ints((graph.state.offset(slot),)) for name, slot in call.states.items()}
    return replace(call, weights={**call.weights, **offsets})


def _edit(editor: BodyEditor, call: Call, page_tokens: int) -> None:
    for node in editor.find("attention"):
        _place_attention(editor, call, node, page_tokens)
    for node in editor.body.placeholders:
        if role(node) is Role.STATE:
            editor.inputs[node.name].replace_all_uses_with(_arena(editor))


def _arena(editor: BodyEditor) -> Node:
    return editor.input("arena", Role.ARENA, ("A",), torch.uint8)


def _place_attention(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    a = arguments(node)
    arena, table = _arena(editor), editor.step("page_table")
    name = offset_name(as_node(a["kv"]).name)
    offset = editor.weight(name, call.weights[name], lambda weights: weights[name])
    heads, v_dim = (int(size) for size in a["v"].meta["val"].shape[-2:])
    with editor.before(node):
        editor.op(
            "cache_write", a["k"], a["v"], arena, table, a["seq_ids"], a["positions"], offset, page_tokens,
            label=f"{node.name}_write",
        )  # fmt: skip
        paged = editor.op(
            "paged_attention", a["q"], arena, table, a["q_starts"], a["kv_lens"], offset, a["sinks"], page_tokens,
            heads, v_dim, a["scale"], a["window"], a["softcap"], a["chunk"], a["slopes"],
            label=node.name,
        )  # fmt: skip
    editor.swap(node, paged)
