"""The ops of attention over a window beside compressed rows (DeepSeek V4).

One key a token for all heads, which is its value too. Values are turned like keys, so results are turned back.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter
from treadle.graph.primitives import Norm
from treadle.graph.spec import CompressIndex, Csa

LAYOUT, AT = "interleaved", "tail"


def write_csa(writer: LayerWriter, op: Csa, h: Node, path: str, name: str) -> Node:
    """Append o_b(o_a(unrope(attention(rope(norm(q_b(low))), rope(norm(kv h)))))), low = norm(q_a h)."""
    table, positions = writer.rope_rows(op.rope), writer.step("positions")

    def turned(x: Node, label: str, inverse: bool = False) -> Node:
        return writer.op("rope", x, positions, table, LAYOUT, AT, inverse, label=label)

    low = writer.norm(op.norm, writer.linear(h, f"{path}.q_a", f"{name}_q_a"), f"{path}.q_a_norm", f"{name}_q_a_norm")
    q = writer.view(writer.linear(low, f"{path}.q_b", f"{name}_q_b"), (-1, op.heads, op.head_dim), f"{name}_q_heads")
    plain = Norm(eps=op.norm.eps, weight=False)
    q = turned(writer.norm(plain, q, f"{path}.none", f"{name}_q_norm"), f"{name}_q_rope")
    k = writer.norm(op.norm, writer.linear(h, f"{path}.kv", f"{name}_kv"), f"{path}.kv_norm", f"{name}_kv_norm")
    k = turned(writer.view(k, (-1, 1, op.head_dim), f"{name}_k_head"), f"{name}_k_rope")
    k = writer.view(k, (-1, op.head_dim), f"{name}_k")
    (memory,) = writer.keep(op, path)
    steps = [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]
    sinks = writer.weight(f"{path}.sinks", f"{name}_sinks")
    scale = op.head_dim**-0.5
    if op.compress is None:
        o = writer.op(
            "latent_attention", q, k, memory, *steps, sinks, scale, op.head_dim, op.window, label=f"{name}_attention"
        )
    else:
        compress = op.compress
        row, made = _row(writer, (k, h), f"{path}.comp", f"{name}_comp")
        index: tuple[Node | None, ...] = (None, None, None, None)
        if compress.index is not None:
            row, small = _row(writer, (row, h), f"{path}.comp.index", f"{name}_index")
            query, weights = _index_query(writer, compress.index, h, low, f"{path}.comp.index", f"{name}_index")
            index = (turned(query, f"{name}_index_q_rope"), weights, *small)
        o = writer.op(
            "compressed_attention", q, row, memory, *steps, sinks, *made, table, *index, compress.rate,
            compress.overlap, compress.index.topk if compress.index else 0, op.window, scale, op.norm.eps,
            label=f"{name}_attention",
        )  # fmt: skip
    o = turned(o, f"{name}_unrope", True)
    width = op.heads * op.head_dim // op.o_groups
    o = writer.view(o, (-1, op.o_groups, width), f"{name}_groups")
    o = writer.op("head_linear", o, writer.weight(f"{path}.o_a.weight", f"{name}_o_a_weight"), label=f"{name}_o_a")
    return writer.linear(writer.view(o, (-1, op.o_groups * op.o_lora), f"{name}_low"), f"{path}.o_b", f"{name}_o_b")


def _row(writer: LayerWriter, inputs: tuple[Node, Node], path: str, name: str) -> tuple[Node, tuple[Node, Node]]:
    """Return a token's row with content and gate of compressed rows behind it, and their ape and norm."""
    row, h = inputs
    parts = [writer.linear(h, f"{path}.{part}", f"{name}_{part}") for part in ("kv", "gate")]
    ape, norm = writer.float32(f"{path}.ape", f"{name}_ape"), writer.float32(f"{path}.norm.weight", f"{name}_norm")
    return writer.join([row, *parts], f"{name}_row"), (ape, norm)


def _index_query(
    writer: LayerWriter, index: CompressIndex, h: Node, low: Node, path: str, name: str
) -> tuple[Node, Node]:
    """Return the index's queries [T, H, D], not turned yet, and how much each head counts: float32 [T, H]."""
    q = writer.view(writer.linear(low, f"{path}.q", f"{name}_q"), (-1, index.heads, index.dim), f"{name}_q_heads")
    if writer.model.dtype != torch.float32:
        h = writer.call(torch.ops.aten._to_copy.default, h, dtype=torch.float32, label=f"{name}_in")
    # a factor of all scores changes no choice
    return q, writer.op("linear", h, writer.float32(f"{path}.w.weight", f"{name}_w"), None, label=f"{name}_weights")
