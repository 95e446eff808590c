"""The ops of attention: projections, norms of queries and keys, positions, the softmax, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from treadle.graph.index_body import side_parts
from treadle.graph.ir import Role
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Attention, Index, SpecError
from treadle.graph.weights import AlibiSlopes, Ints


def write_attention(writer: LayerWriter, op: Attention, h: Node, path: str, name: str) -> Node:
    """Append o(out_norm(gate * attention(q h, k h, v h)))."""
    if op.kv_from is not None:
        return _write_shared(writer, op, h, path, name)
    history, convs = _own_history(writer, op, path)
    side = [] if op.index is None else [convs.pop(0)]
    q, k, v = _projections(writer, op, h, convs, path, name)
    q, k = (_position(writer, op, t, path, f"{name}_{p}", p) for t, p in ((q, "q"), (k, "k")))
    v = writer.norm(op.v_norm, v, f"{path}.v_norm", f"{name}_v_norm")
    q = _heated(writer, op, q, f"{name}_q_heat")
    if op.diff is not None:
        v = _paired_values(writer, op, v, name)
    if op.rel is not None:
        o = _attend_relative(writer, op, (q, k, v), history, h, path, name)
    elif op.index is not None:
        o = _attend_blocks(writer, op, op.index, (q, k, v), (history, *side), h, path, name)
    else:
        o = _attend(writer, op, (q, k, v), history, path, name)
    if op.diff is not None:
        lambdas = [writer.weight(f"{path}.{part}", f"{name}_{part}") for part in ("lq1", "lk1", "lq2", "lk2")]
        o = writer.op("differential", o, *lambdas, op.diff.init, op.diff.eps, label=f"{name}_differential")
    return _written(writer, op, o, h, path, name)


def _written(writer: LayerWriter, op: Attention, o: Node, h: Node, path: str, name: str) -> Node:
    """Append what follows the attention: gate, norm and output projection."""
    o = _gated(writer, op, o, h, path, name)
    o = writer.norm(op.out_norm, o, f"{path}.out_norm", f"{name}_out_norm")
    return writer.linear(o, f"{path}.o", f"{name}_o")


def _write_shared(writer: LayerWriter, op: Attention, h: Node, path: str, name: str) -> Node:
    """Append queries over the keys and values that another layer has appended."""
    refuse(path, {"diff": op.diff, "rel": op.rel, "index": op.index})
    q = writer.linear(h, f"{path}.q", f"{name}_q")
    if op.qk_norm is not None and op.qk_norm.scope == "full":
        q = writer.norm(op.qk_norm, q, f"{path}.q_norm", f"{name}_q_norm")
    q = writer.affine(q, clip=op.clip, label=f"{name}_q_clip")
    q = writer.view(q, (-1, op.heads, op.head_dim), f"{name}_q_heads")
    q = _heated(writer, op, _position(writer, op, q, path, f"{name}_q", "q"), f"{name}_q_heat")
    kv = _shared_history(writer, op, path)
    sinks, slopes = _sinks(writer, op, path, name), _slopes(writer, op)
    o = writer.op(
        "shared_attention", q, kv, *_steps(writer), sinks, op.cached_v_dim, op.scale, op.window, op.softcap, op.chunk,
        slopes, label=f"{name}_attention",
    )  # fmt: skip
    return _written(writer, op, o, h, path, name)


def _heated(writer: LayerWriter, op: Attention, q: Node, label: str) -> Node:
    """Return queries, or what else is added to their logits, times what grows with their position."""
    heat = op.q_temperature
    if heat is None:
        return q
    positions = writer.step("positions")
    return writer.op("q_temperature", q, positions, heat.beta, heat.length, heat.shift, heat.smooth, label=label)


def _projections(
    writer: LayerWriter, op: Attention, h: Node, convs: Sequence[Node], path: str, name: str
) -> tuple[Node, Node, Node]:
    """Return q [T, H, D], k [T, K, D] and v [T, K, Dv], convolved, scaled, normed as a whole and clipped."""
    q, k = (writer.linear(h, f"{path}.{part}", f"{name}_{part}") for part in "qk")
    v = k if op.v_from_k else writer.linear(h, f"{path}.v", f"{name}_v")
    if convs:
        k, v = (
            writer.added_conv(t, memory, f"{path}.{p}_conv", f"{name}_{p}_conv")
            for t, memory, p in zip((k, v), convs, "kv")
        )
    if op.qk_norm is not None and op.qk_norm.scope == "full":
        q, k = (writer.norm(op.qk_norm, t, f"{path}.{p}_norm", f"{name}_{p}_norm") for t, p in ((q, "q"), (k, "k")))
    k = writer.affine(k, scale=op.k_scale, label=f"{name}_k_scale")
    v = writer.affine(v, scale=op.v_scale, label=f"{name}_v_scale")
    q, k, v = (writer.affine(t, clip=op.clip, label=f"{name}_{p}_clip") for t, p in zip((q, k, v), "qkv"))
    q = writer.view(q, (-1, op.heads, op.head_dim), f"{name}_q_heads")
    k = writer.view(k, (-1, op.kv_heads, op.head_dim), f"{name}_k_heads")
    v = writer.view(v, (-1, op.kv_heads, op.v_head_dim), f"{name}_v_heads")
    return q, k, v


def _position(writer: LayerWriter, op: Attention, x: Node, path: str, name: str, part: str) -> Node:
    """Append the norm of heads and rope in the order that ``op`` gives them."""
    norm = op.qk_norm if op.qk_norm is not None and op.qk_norm.scope != "full" else None
    if norm is not None and not norm.after_rope:
        x = writer.norm(norm, x, f"{path}.{part}_norm", f"{name}_norm")
    if op.rope is not None:
        table = writer.rope_rows(op.rope)
        x = writer.op("rope", x, writer.step("positions"), table, op.layout, op.rope_at, label=f"{name}_rope")
    if norm is not None and norm.after_rope:
        x = writer.norm(norm, x, f"{path}.{part}_norm", f"{name}_norm")
    return x


def _own_history(writer: LayerWriter, op: Attention, path: str) -> tuple[Node, list[Node]]:
    """Return the history that ``op`` appends to, its side keys where it has an index, and states of convolutions."""
    kv, *convs = writer.keep(op, path)
    writer.model.kv_of_layer[int(path.split(".")[1])] = (op, writer.states[kv.name])
    return kv, convs


def _shared_history(writer: LayerWriter, op: Attention, path: str) -> Node:
    """Return the history of another layer. Raises: SpecError if the layer that ``kv_from`` names keeps no such."""
    assert op.kv_from is not None
    owner, slot = writer.model.kv_of_layer.get(op.kv_from, (None, None))
    fields = ("kv_heads", "head_dim", "cached_v_dim", "window", "chunk")
    if owner is None or slot is None or any(getattr(owner, f) != getattr(op, f) for f in fields):
        raise SpecError("that layer keeps no such keys and values", key=f"{path}.kv_from", value=op.kv_from)
    writer.states["kv"] = slot
    return writer.input("kv", Role.STATE, ("B", "L", op.kv_heads, op.head_dim + op.cached_v_dim), writer.model.dtype)


def _steps(writer: LayerWriter) -> list[Node]:
    """Return the fields of a step that say where its tokens stand in their histories."""
    return [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]


def _sinks(writer: LayerWriter, op: Attention, path: str, name: str) -> Node | None:
    return writer.weight(f"{path}.sinks", f"{name}_sinks") if op.sinks else None


def _slopes(writer: LayerWriter, op: Attention) -> Node | None:
    if op.alibi is None:
        return None
    return writer.bind("alibi_slopes", AlibiSlopes(op.heads, op.alibi.max_bias, op.scale if op.alibi.scaled else 1.0))


def _attend(writer: LayerWriter, op: Attention, qkv: tuple[Node, Node, Node], kv: Node, path: str, name: str) -> Node:
    """Append the attention over the layer's history: [T, H, Dv]."""
    steps = _steps(writer)
    sinks, slopes = _sinks(writer, op, path, name), _slopes(writer, op)
    return writer.op(
        "attention", *qkv, kv, *steps, sinks, op.scale, op.window, op.softcap, op.chunk, slopes,
        label=f"{name}_attention",
    )  # fmt: skip


def _attend_relative(
    writer: LayerWriter, op: Attention, qkv: tuple[Node, Node, Node], kv: Node, h: Node, path: str, name: str
) -> Node:
    """Append the attention with a bias by distance, which ``h`` makes: rel^T (r h)."""
    refuse(path, {"sinks": op.sinks, "softcap": op.softcap, "chunk": op.chunk, "alibi": op.alibi, "diff": op.diff})
    assert op.rel is not None
    states = writer.linear(h, f"{path}.r", f"{name}_r")
    states = writer.view(states, (-1, op.heads, op.rel.dim), f"{name}_r_heads")
    bias = writer.linear(states, f"{path}.rel", f"{name}_rel")
    bias = _heated(writer, op, bias, f"{name}_rel_heat")
    return writer.op(
        "relative_attention", *qkv, bias, kv, *_steps(writer), op.scale, op.window, label=f"{name}_attention"
    )


def _attend_blocks(
    writer: LayerWriter, op: Attention, index: Index, qkv: tuple[Node, Node, Node], states: tuple[Node, ...], h: Node,
    path: str, name: str,
) -> Node:  # fmt: skip
    """Append the attention over the blocks of keys that a small attention chooses."""
    fields = {field: getattr(op, field) for field in ("sinks", "softcap", "chunk", "window", "alibi", "diff")}
    refuse(path, {**fields, "index.kind": index.kind != "block" and index.kind, "index.share": index.share})
    q, k = side_parts(writer, index, h, h, f"{path}.index", f"{name}_index")
    return writer.op(
        "block_attention", *qkv, q, k, *states, *_steps(writer), op.scale, index.block, index.topk, index.local,
        label=f"{name}_attention",
    )  # fmt: skip


def _paired_values(writer: LayerWriter, op: Attention, v: Node, name: str) -> Node:
    """Return values [T, K, 2 Dv]: the first half of the heads beside the second half, both halves of K alike.

    One softmax then mixes what the two attentions of a differential attention mix; the cache holds values twice.
    """
    half = op.kv_heads // 2
    order = [head for _ in range(2) for first in range(half) for head in (first, first + half)]
    places = writer.bind("value_heads", Ints(tuple(order)))
    v = writer.choose(v, 1, places, f"{name}_v_pairs")
    return writer.view(v, (-1, op.kv_heads, op.cached_v_dim), f"{name}_v_paired")


def _gated(writer: LayerWriter, op: Attention, o: Node, h: Node, path: str, name: str) -> Node:
    """Return the output as rows [T, H * Dv], times its gate if it has one."""
    width = op.heads * op.v_head_dim
    if op.gate is None:
        return writer.view(o, (-1, width), f"{name}_out")
    if op.gate.source != "hidden":
        refuse(path, {"gate.from": op.gate.source})
    gate = writer.linear(h, f"{path}.gate", f"{name}_gate")
    if op.gate.per == "head":
        o = writer.op("gate_heads", o, gate, op.gate.act, label=f"{name}_gated")
        return writer.view(o, (-1, width), f"{name}_out")
    o = writer.view(o, (-1, width), f"{name}_out")
    return writer.op("act_mul", gate, o, op.gate.act, label=f"{name}_gated")
