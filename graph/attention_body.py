"""The ops of attention: projections, norms of queries and keys, positions, the softmax, and what follows it."""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Attention
from treadle.graph.weights import AlibiSlopes, Ints

_LATER = ("k_conv", "rel", "index")


def write_attention(writer: LayerWriter, op: Attention, h: Node, path: str, name: str) -> Node:
    """Append o(out_norm(gate * attention(q h, k h, v h)))."""
    refuse(path, {field: getattr(op, field) for field in _LATER})
    q, k, v = _projections(writer, op, h, path, name)
    q, k = (_position(writer, op, t, path, f"{name}_{p}", p) for t, p in ((q, "q"), (k, "k")))
    v = writer.norm(op.v_norm, v, f"{path}.v_norm", f"{name}_v_norm")
    if op.q_temperature is not None:
        heat = op.q_temperature
        q = writer.op(
            "q_temperature", q, writer.step("positions"), heat.beta, heat.length, heat.shift, label=f"{name}_q_heat"
        )
    if op.diff is not None:
        v = _paired_values(writer, op, v, name)
    o = _attend(writer, op, q, k, v, path, name)
    if op.diff is not None:
        lambdas = [writer.weight(f"{path}.{part}", f"{name}_{part}") for part in ("lq1", "lk1", "lq2", "lk2")]
        o = writer.op("differential", o, *lambdas, op.diff.init, op.diff.eps, label=f"{name}_differential")
    o = _gated(writer, op, o, h, path, name)
    o = writer.norm(op.out_norm, o, f"{path}.out_norm", f"{name}_out_norm")
    return writer.linear(o, f"{path}.o", f"{name}_o")


def _projections(writer: LayerWriter, op: Attention, h: Node, path: str, name: str) -> tuple[Node, Node, Node]:
    """Return q [T, H, D], k [T, K, D] and v [T, K, Dv], scaled, normed as a whole and clipped."""
    q, k = (writer.linear(h, f"{path}.{part}", f"{name}_{part}") for part in "qk")
    v = k if op.v_from_k else writer.linear(h, f"{path}.v", f"{name}_v")
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


def _attend(writer: LayerWriter, op: Attention, q: Node, k: Node, v: Node, path: str, name: str) -> Node:
    """Append the attention over the layer's history: [T, H, Dv]."""
    (kv,) = writer.keep(op, path)
    steps = [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]
    sinks = writer.weight(f"{path}.sinks", f"{name}_sinks") if op.sinks else None
    slopes = None
    if op.alibi is not None:
        factor = op.scale if op.alibi.scaled else 1.0
        slopes = writer.bind("alibi_slopes", AlibiSlopes(op.heads, op.alibi.max_bias, factor))
    return writer.op(
        "attention", q, k, v, kv, *steps, sinks, op.scale, op.window, op.softcap, op.chunk, slopes,
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
