"""The ops of latent attention, in absorbed form: scores and sums are made of latents, which are never expanded.

Of kv_b, the half that makes keys goes to the queries, q' = W_k^T q, since q . (W_k c) = (W_k^T q) . c; the half that
makes values comes behind the attention, since sum_j p_j W_v c_j = W_v sum_j p_j c_j. A token's key is its latent beside
its rope key, one row for all heads; its value is the latent.
"""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.index_body import write_index
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Mla
from treadle.graph.weights import HeadRows


def write_mla(writer: LayerWriter, op: Mla, h: Node, path: str, name: str) -> Node:
    """Append o(gate * W_v attention(W_k^T q ++ rope(q'), norm(latent) ++ rope(key)))."""
    if op.index is not None:
        refuse(path, {"window of a sparse attention": op.window, "index.kind": op.index.kind != "dsa" and "block"})
    refuse(path, {"kv_b.bias": f"{path}.kv_b.bias" in writer.model.tensors})
    q, low, source = _query(writer, op, h, path, name)
    k = _key(writer, op, h, path, name)
    latent, *side = writer.keep(op, path)
    select = None
    if op.index is not None:
        select = write_index(writer, op.index, h, low, side, f"{path}.index", f"{name}_index")
    steps = [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]
    sinks = writer.weight(f"{path}.sinks", f"{name}_sinks") if op.sinks else None
    o = writer.op(
        "latent_attention", q, k, latent, *steps, sinks, op.scale, op.kv_lora, op.window, select,
        label=f"{name}_attention",
    )  # fmt: skip
    o = writer.op("head_linear", o, _half(writer, op, path, name, "v"), label=f"{name}_values")
    o = _gated(writer, op, o, source if op.gate is not None and op.gate.source == "q_lora" else h, path, name)
    return writer.linear(o, f"{path}.o", f"{name}_o")


def _query(writer: LayerWriter, op: Mla, h: Node, path: str, name: str) -> tuple[Node, Node, Node]:
    """Return queries [T, H, kv_lora + rope_dim] in terms of latents, their own normed latent, and what q_b reads."""
    if op.q_lora is None:
        low = source = h
        q = writer.linear(h, f"{path}.q", f"{name}_q")
    else:
        raw = writer.linear(h, f"{path}.q_a", f"{name}_q_a")
        low = source = writer.norm(op.lora_norm, raw, f"{path}.q_a_norm", f"{name}_q_a_norm")
        if op.q_concat_raw:
            source = writer.join([low, raw], f"{name}_q_source")
        q = writer.linear(source, f"{path}.q_b", f"{name}_q_b")
    q = writer.affine(q, scale=op.q_lora_scale, label=f"{name}_q_scale")
    q = writer.view(q, (-1, op.heads, op.nope + op.rope_dim), f"{name}_q_heads")
    plain, turned = writer.split(q, [op.nope, op.rope_dim], f"{name}_q")
    plain = writer.op("head_linear", plain, _half(writer, op, path, name, "k"), label=f"{name}_q_latent")
    return writer.join([plain, _turned(writer, op, turned, f"{name}_q")], f"{name}_q_absorbed"), low, source


def _key(writer: LayerWriter, op: Mla, h: Node, path: str, name: str) -> Node:
    """Return what is cached of each token: [T, kv_lora + rope_dim]."""
    both = writer.linear(h, f"{path}.kv_a", f"{name}_kv_a")
    latent, key = writer.split(both, [op.kv_lora, op.rope_dim], f"{name}_kv")
    latent = writer.norm(op.lora_norm, latent, f"{path}.kv_a_norm", f"{name}_kv_a_norm")
    latent = writer.affine(latent, scale=op.kv_lora_scale, label=f"{name}_kv_scale")
    if op.rope is not None:
        key = writer.view(key, (-1, 1, op.rope_dim), f"{name}_k_head")
        key = writer.view(_turned(writer, op, key, f"{name}_k"), (-1, op.rope_dim), f"{name}_k_turned")
    return writer.join([latent, key], f"{name}_k")


def _turned(writer: LayerWriter, op: Mla, x: Node, name: str) -> Node:
    if op.rope is None:
        return x
    table = writer.rope_rows(op.rope)
    return writer.op("rope", x, writer.step("positions"), table, op.layout, label=f"{name}_rope")


def _half(writer: LayerWriter, op: Mla, path: str, name: str, part: str) -> Node:
    """Return the part of kv_b that makes keys, turned to act on queries [H, L, nope], or values, [H, v_dim, L]."""
    leaf = writer.leaf(f"{path}.kv_b.weight")
    if part == "k":
        return writer.bind(f"{name}_kv_b_k", HeadRows(leaf, op.heads, 0, op.nope, turned=True))
    return writer.bind(f"{name}_kv_b_v", HeadRows(leaf, op.heads, op.nope, op.v_dim))


def _gated(writer: LayerWriter, op: Mla, o: Node, source: Node, path: str, name: str) -> Node:
    """Return the output as rows [T, H * v_dim], times its gate if it has one."""
    width = op.heads * op.v_dim
    if op.gate is None:
        return writer.view(o, (-1, width), f"{name}_out")
    gate = writer.linear(source, f"{path}.gate", f"{name}_gate")
    if op.gate.per == "head":
        o = writer.op("gate_heads", o, gate, op.gate.act, label=f"{name}_gated")
        return writer.view(o, (-1, width), f"{name}_out")
    o = writer.view(o, (-1, width), f"{name}_out")
    return writer.op("act_mul", gate, o, op.gate.act, label=f"{name}_gated")
