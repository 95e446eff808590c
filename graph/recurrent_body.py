"""What the bodies of ops with a state of fixed size share: joined projections, short convolutions, gated norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Norm
from treadle.graph.weights import Concat, NegativeExp, WeightExpr


def joined_linear(writer: LayerWriter, h: Node, path: str, parts: Sequence[str], name: str) -> Node:
    """Append the product of ``h`` with the matrices ``parts``, one below the other: [T, sum of their rows]."""
    weight = writer.bind(f"{name}_weight", _joined(writer, [f"{path}.{part}.weight" for part in parts]))
    biases = [f"{path}.{part}.bias" for part in parts]
    bias = None
    if biases[0] in writer.model.tensors:
        bias = writer.bind(f"{name}_bias", _joined(writer, biases))
    return writer.op("linear", h, weight, bias, label=name)


def short_conv(
    writer: LayerWriter, x: Node, memory: Node, path: str, parts: Sequence[str], act: str, name: str
) -> Node:
    """Append the convolution of the channels of ``x`` [T, C], those of ``parts`` one beside the other."""
    weight = writer.bind(f"{name}_weight", _joined(writer, [f"{path}.{part}.weight" for part in parts]))
    biases = [f"{path}.{part}.bias" for part in parts]
    bias = None
    if biases[0] in writer.model.tensors:
        bias = writer.bind(f"{name}_bias", _joined(writer, biases))
    return writer.op("conv1d", x, weight, bias, *writer.state_tail(memory), act, label=name)


def split(writer: LayerWriter, x: Node, sizes: Sequence[int], names: Sequence[str], name: str) -> list[Node]:
    """Return the channels of ``x`` [T, C] in parts of ``sizes``."""
    parts = writer.call(torch.ops.aten.split_with_sizes.default, x, list(sizes), -1, label=f"{name}_parts")
    return [writer.item(parts, i, f"{name}_{part}") for i, part in enumerate(names)]


def decay_rates(writer: LayerWriter, path: str, name: str) -> Node:
    """Return the input that holds -exp(A_log) in float32."""
    return writer.bind(f"{name}_rates", NegativeExp(writer.leaf(f"{path}.A_log", "float32")))


def gated_norm(writer: LayerWriter, norm: Norm, x: Node, gate: Node, path: str, name: str) -> Node:
    """Append a norm over the last dim with a gate of the shape of ``x``, SiLU unless the norm says otherwise."""
    refuse(path, {"low_rank_gate": norm.low_rank_gate})
    weight = writer.optional(f"{path}.weight", f"{name}_weight")
    bias = writer.optional(f"{path}.bias", f"{name}_bias")
    return writer.op(
        "gated_norm", x, gate, weight, bias, norm.kind, norm.eps, norm.plus_one, norm.groups, norm.cast,
        norm.gate_act or "silu", norm.gate_first, label=name,
    )  # fmt: skip


def _joined(writer: LayerWriter, names: Sequence[str]) -> WeightExpr:
    parts = tuple(writer.leaf(name) for name in names)
    return parts[0] if len(parts) == 1 else Concat(parts, 0)
