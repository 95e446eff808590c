"""Move every layer's history into the arena: dense attention becomes a cache write and attention over pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from treadle.graph.ir import Call, Graph, Level, Role
from treadle.graph.weights import Ints
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite

LAYER_OFFSET = "layer_offset"


@dataclass(frozen=True, kw_only=True)
class PlaceState(Pass):
    """Bodies then take the arena as one byte tensor, and where their layer lies in a page as a small constant."""

    level = Level.MODEL

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph of one rank, its state in the arena."""
        placed = tuple(_offset(graph, call) for call in graph.calls)
        page_tokens = graph.state.page_tokens

        def edit(editor: BodyEditor, call: Call) -> None:
            _edit(editor, call, page_tokens)

        return rewrite(graph.replace_bodies(graph.bodies, placed), edit, Level.SHARDED)


def _offset(graph: Graph, call: Call) -> Call:
    if call.state_slot is None:
        return call
    offset = Ints((graph.state.layer_offset(call.state_slot),))
    return replace(call, weights={**call.weights, LAYER_OFFSET: offset})


def _edit(editor: BodyEditor, call: Call, page_tokens: int) -> None:
    for node in editor.find("attention"):
        a = arguments(node)
        arena = editor.input("arena", Role.ARENA, ("A",), torch.uint8)
        table = editor.step("page_table")
        offset = editor.weight(LAYER_OFFSET, call.weights[LAYER_OFFSET], lambda weights: weights[LAYER_OFFSET])
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
