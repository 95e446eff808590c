"""The body of a layer: its sublayers in order, each between the norms and residual sums that its description gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from treadle.graph.attention_body import write_attention
from treadle.graph.conv_body import write_short_conv
from treadle.graph.delta_body import write_delta
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.mamba_body import write_mamba1, write_mamba2
from treadle.graph.mlp_body import write_mlp
from treadle.graph.moe_body import write_moe
from treadle.graph.spec import (
    Attention,
    Branch,
    Delta,
    Layer,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    Op,
    ShortConv,
    SpecError,
    Sub,
)

WRITERS: dict[type[Any], Callable[..., Node]] = {
    Attention: lambda writer, op, _, h, path, name: write_attention(writer, op, h, path, name),
    Mlp: lambda writer, op, _, h, path, name: write_mlp(writer, op, h, path, name),
    Moe: lambda writer, op, x, h, path, name: write_moe(writer, op, x, h, path, name),
    Delta: lambda writer, op, _, h, path, name: write_delta(writer, op, h, path, name),
    Mamba2: lambda writer, op, _, h, path, name: write_mamba2(writer, op, h, path, name),
    Mamba1: lambda writer, op, _, h, path, name: write_mamba1(writer, op, h, path, name),
    ShortConv: lambda writer, op, _, h, path, name: write_short_conv(writer, op, h, path, name),
}
"""Takes the writer, the op, the residual stream and the op's input [T, C] each, the path of its weights and a name;
returns its output [T, C]."""

_LATER = ("tap", "source", "hold", "add", "post_conv", "snapshot")


def write_layer(writer: LayerWriter, layer: Layer, next_norm: Norm | None, next_path: str) -> dict[str, Node]:
    """Write (x, h) -> (x, h): h is x as normed for this layer, then for what follows it."""
    hidden = writer.model.spec.hidden
    x = writer.stream("x", hidden)
    h = writer.stream("h", hidden)
    for index, sub in enumerate(layer.subs):
        path = f"layers.{layer.index}.{sub.name}"
        if index:
            h = writer.norm(sub.pre, x, f"{path}.pre", f"{sub.name}_pre")
        elif sub.pre is None:
            h = x
        x = _write_sub(writer, sub, x, h, path)
    return {"x": x, "h": writer.norm(next_norm, x, next_path, "next_norm")}


def _write_sub(writer: LayerWriter, sub: Sub, x: Node, h: Node, path: str) -> Node:
    """Return the residual stream behind a sublayer."""
    refuse(path, {name: getattr(sub, name) for name in _LATER})
    if sub.input != "hidden":
        raise SpecError(f"{path}: input = {sub.input!r} has no kernels yet")
    kept = h if sub.residual_from == "normed" else x
    name = f"{sub.name}_residual"
    if sub.op is not None:
        y = writer.norm(sub.post, _write_op(writer, sub.op, x, h, path, sub.name), f"{path}.post", f"{sub.name}_post")
        x = writer.op("add", kept, y, sub.skip_scale, sub.out_scale, label=name)
    elif sub.post is None:
        x = _add_branches(writer, sub, kept, (x, h), path, sub.skip_scale, sub.out_scale)
    else:
        y = writer.norm(
            sub.post, _add_branches(writer, sub, None, (x, h), path, 1.0, 1.0), f"{path}.post", f"{sub.name}_post"
        )
        x = writer.op("add", kept, y, sub.skip_scale, sub.out_scale, label=name)
    return writer.norm(sub.post_residual, x, f"{path}.post_residual", f"{sub.name}_post_residual")


def _add_branches(
    writer: LayerWriter, sub: Sub, total: Node | None, inputs: tuple[Node, Node], path: str, kept: float, scale: float
) -> Node:
    """Return kept * total + scale * (the sum of all branches), one after the other."""
    for branch in sub.branches:
        y, share = _write_branch(writer, branch, *inputs, path), branch.scale * scale
        if total is None:
            total, kept = y, share
            continue
        total = writer.op("add", total, y, kept, share, label=f"{branch.name}_residual")
        kept = 1.0
    if total is None or kept != 1.0:
        raise SpecError(f"{path}: a sum of branches needs two of them")
    return total


def _write_branch(writer: LayerWriter, branch: Branch, x: Node, h: Node, path: str) -> Node:
    """Return what one branch gives, before its scale; its weights lie beside those of the sublayer."""
    path = f"{path.rpartition('.')[0]}.{branch.name}"
    h = writer.norm(branch.pre, h, f"{path}.pre", f"{branch.name}_pre")
    h = writer.affine(h, scale=branch.in_scale, label=f"{branch.name}_in_scale")
    y = _write_op(writer, branch.op, x, h, path, branch.name)
    return writer.norm(branch.post, y, f"{path}.post", f"{branch.name}_post")


def _write_op(writer: LayerWriter, op: Op, x: Node, h: Node, path: str, name: str) -> Node:
    write = WRITERS.get(type(op))
    if write is None:
        raise SpecError(f"{path}: op {type(op).__name__.lower()} has no kernels yet")
    return write(writer, op, x, h, path, name)
