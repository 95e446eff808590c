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
    for node in editor.find("shared_attention"):
        _place_shared(editor, call, node, page_tokens)
    for node in editor.find("relative_attention"):
        _place_relative(editor, call, node, page_tokens)
    for node in editor.find("latent_attention", "index_select"):
        _place_latent(editor, call, node, page_tokens)
    for node in editor.find("block_attention"):
        _place_blocks(editor, call, node, page_tokens)
    for node in editor.find("compressed_attention"):
        _place_compressed(editor, call, node, page_tokens)
    for node in editor.body.placeholders:
        if role(node) is Role.STATE:
            editor.inputs[node.name].replace_all_uses_with(_arena(editor))


def _arena(editor: BodyEditor) -> Node:
    return editor.input("arena", Role.ARENA, ("A",), torch.uint8)


def _bind_offset(editor: BodyEditor, call: Call, state: Node) -> Node:
    name = offset_name(state.name)
    return editor.weight(name, call.weights[name], lambda weights: weights[name])


def _place_attention(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    a = arguments(node)
    arena, table, offset = _arena(editor), editor.step("page_table"), _bind_offset(editor, call, as_node(a["kv"]))
    heads, v_dim = (int(size) for size in a["v"].meta["val"].shape[-2:])
    with editor.before(node):
        _write(editor, node, arena, table, offset, page_tokens)
        paged = editor.op(
            "paged_attention", a["q"], arena, table, a["q_starts"], a["kv_lens"], offset, a["sinks"], page_tokens,
            heads, v_dim, a["scale"], a["window"], a["softcap"], a["chunk"], a["slopes"],
            label=node.name,
        )  # fmt: skip
    editor.swap(node, paged)


def _write(editor: BodyEditor, node: Node, arena: Node, table: Node, offset: Node, page_tokens: int) -> None:
    """Store the keys and values of this step."""
    a = arguments(node)
    editor.op(
        "cache_write", a["k"], a["v"], arena, table, a["seq_ids"], a["positions"], offset, page_tokens,
        label=f"{node.name}_write",
    )  # fmt: skip


def _place_shared(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    """The keys and values are another layer's, which has stored them before."""
    a = arguments(node)
    arena, table, offset = _arena(editor), editor.step("page_table"), _bind_offset(editor, call, as_node(a["kv"]))
    heads = int(a["kv"].meta["val"].shape[2])
    with editor.before(node):
        paged = editor.op(
            "paged_attention", a["q"], arena, table, a["q_starts"], a["kv_lens"], offset, a["sinks"], page_tokens,
            heads, a["v_dim"], a["scale"], a["window"], a["softcap"], a["chunk"], a["slopes"],
            label=node.name,
        )  # fmt: skip
    editor.swap(node, paged)


def _place_relative(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    a = arguments(node)
    arena, table, offset = _arena(editor), editor.step("page_table"), _bind_offset(editor, call, as_node(a["kv"]))
    heads, v_dim = (int(size) for size in a["v"].meta["val"].shape[-2:])
    with editor.before(node):
        _write(editor, node, arena, table, offset, page_tokens)
        paged = editor.op(
            "paged_relative_attention", a["q"], a["bias"], arena, table, a["q_starts"], a["kv_lens"], offset,
            page_tokens, heads, v_dim, a["scale"], a["window"], label=node.name,
        )  # fmt: skip
    editor.swap(node, paged)


def _place_latent(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    """Place latent attention, or the choice of keys, over rows that all heads share."""
    a = arguments(node)
    arena, table = _arena(editor), editor.step("page_table")
    offset = _bind_offset(editor, call, as_node(a["kv"] if "kv" in a else a["keys"]))
    where = (arena, table, a["q_starts"], a["kv_lens"], offset)
    with editor.before(node):
        editor.op(
            "latent_write", a["k"], arena, table, a["seq_ids"], a["positions"], offset, page_tokens,
            label=f"{node.name}_write",
        )  # fmt: skip
        if "kv" in a:
            rest = (a["sinks"], page_tokens, a["scale"], a["v_dim"], a["window"], a["select"])
            placed = editor.op("paged_latent_attention", a["q"], *where, *rest, label=node.name)
        else:
            placed = editor.op(
                "paged_index_select", a["q"], a["weights"], *where, page_tokens, a["topk"], label=node.name
            )
    editor.swap(node, placed)


def _place_compressed(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    a = arguments(node)
    arena, table, offset = _arena(editor), editor.step("page_table"), _bind_offset(editor, call, as_node(a["kv"]))
    rest = [a[name] for name in list(a)[list(a).index("sinks") :]]
    row_dim = int(a["k"].meta["val"].shape[-1])
    with editor.before(node):
        editor.op(
            "latent_write", a["k"], arena, table, a["seq_ids"], a["positions"], offset, page_tokens,
            label=f"{node.name}_write",
        )  # fmt: skip
        placed = editor.op(
            "paged_compressed_attention", a["q"], arena, table, a["q_starts"], a["kv_lens"], offset, page_tokens,
            row_dim, *rest, label=node.name,
        )  # fmt: skip
    editor.swap(node, placed)


def _place_blocks(editor: BodyEditor, call: Call, node: Node, page_tokens: int) -> None:
    a = arguments(node)
    arena, table = _arena(editor), editor.step("page_table")
    offset, side = (_bind_offset(editor, call, as_node(a[name])) for name in ("kv", "keys"))
    heads, v_dim = (int(size) for size in a["v"].meta["val"].shape[-2:])
    with editor.before(node):
        _write(editor, node, arena, table, offset, page_tokens)
        editor.op(
            "latent_write", a["index_k"], arena, table, a["seq_ids"], a["positions"], side, page_tokens,
            label=f"{node.name}_side_write",
        )  # fmt: skip
        placed = editor.op(
            "paged_block_attention", a["q"], a["index_q"], arena, table, a["q_starts"], a["kv_lens"], offset, side,
            page_tokens, heads, v_dim, a["scale"], a["block"], a["topk"], a["local"], label=node.name,
        )  # fmt: skip
    editor.swap(node, placed)
