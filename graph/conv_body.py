"""The ops of a gated short convolution."""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter
from treadle.graph.recurrent_body import short_conv
from treadle.graph.spec import ShortConv


def write_short_conv(writer: LayerWriter, op: ShortConv, h: Node, path: str, name: str) -> Node:
    """Append o(C * conv(B * x)); weights B, C, x, conv and o."""
    (memory,) = writer.keep(op, path)
    before, behind, x = (writer.linear(h, f"{path}.{part}", f"{name}_{part.lower()}") for part in "BCx")
    x = writer.op("multiply", before, x, label=f"{name}_in")
    x = short_conv(writer, x, memory, path, ("conv",), "none", f"{name}_conv")
    return writer.linear(writer.op("multiply", behind, x, label=f"{name}_out"), f"{path}.o", f"{name}_o")
