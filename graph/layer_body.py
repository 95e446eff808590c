"""The body of a layer: its sublayers in order, each between the norms and residual sums that its description gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from treadle.conf.errors import nearest
from treadle.graph.attention_body import write_attention
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.mla_body import write_mla
from treadle.graph.mlp_body import write_mlp
from treadle.graph.moe_body import write_moe
from treadle.graph.spec import Attention, Branch, Layer, Mla, Mlp, Moe, Norm, Op, SpecError, Sub

WRITERS: dict[type[Any], Callable[..., Node]] = {
    Attention: lambda writer, op, _, h, path, name: write_attention(writer, op, h, path, name),
    Mla: lambda writer, op, _, h, path, name: write_mla(writer, op, h, path, name),
    Mlp: lambda writer, op, _, h, path, name: write_mlp(writer, op, h, path, name),
    Moe: lambda writer, op, x, h, path, name: write_moe(writer, op, x, h, path, name),
}
"""Takes the writer, the op, the residual stream and the op's input [T, C] each, the path of its weights and a name;
returns its output [T, C]."""

_LATER = ("post_conv", "snapshot")


def write_layer(writer: LayerWriter, layer: Layer, next_norm: Norm | None, next_path: str) -> dict[str, Node]:
    """Write (x, h) -> (x, h): h is x as normed for this layer, then for what follows it."""
    hidden = writer.model.spec.hidden
    x = writer.stream("x", hidden)
    h = writer.stream("h", hidden)
    values: dict[str, Node] = {}
    for index, sub in enumerate(layer.subs):
        path = f"layers.{layer.index}.{sub.name}"
        if sub.source is not None:
            h = _value(values, sub.source, f"{path}.from")
        elif index:
            h = writer.norm(sub.pre, x, f"{path}.pre", f"{sub.name}_pre")
        elif sub.pre is None:
            h = x
        if sub.tap is not None:
            values[sub.tap] = h
        x = _write_sub(writer, sub, x, h, path, values)
    return {"x": x, "h": writer.norm(next_norm, x, next_path, "next_norm"), **writer.passed_on}


def _value(values: Mapping[str, Node], name: str, where: str) -> Node:
    """Return what an earlier sublayer of the layer kept under ``name``."""
    if name not in values:
        raise SpecError("no sublayer before keeps that", key=where, value=name, nearest=nearest(name, values))
    return values[name]


def _write_sub(writer: LayerWriter, sub: Sub, x: Node, h: Node, path: str, values: dict[str, Node]) -> Node:
    """Return the residual stream behind a sublayer; one that is held leaves it as it was."""
    refuse(path, {name: getattr(sub, name) for name in _LATER})
    if sub.input != "hidden":
        raise SpecError(f"{path}: input = {sub.input!r} has no kernels yet")
    kept = h if sub.residual_from == "normed" else x
    name = f"{sub.name}_residual"
    if sub.op is not None:
        y = writer.norm(sub.post, _write_op(writer, sub.op, x, h, path, sub.name), f"{path}.post", f"{sub.name}_post")
        if sub.hold is not None:
            values[sub.hold] = y
            return x
        if sub.add is not None:
            y = writer.op("add", y, _value(values, sub.add, f"{path}.add"), label=f"{sub.name}_added")
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
