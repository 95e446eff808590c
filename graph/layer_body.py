"""The body of a layer: its sublayers in order, each between the norms and residual sums that its description gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from treadle.conf.errors import nearest
from treadle.graph.attention_body import write_attention
from treadle.graph.conv_body import write_short_conv
from treadle.graph.csa_body import write_csa
from treadle.graph.delta_body import write_delta
from treadle.graph.layer_state import Weights, kept_behind
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.mamba_body import write_mamba1, write_mamba2
from treadle.graph.mla_body import write_mla
from treadle.graph.mlp_body import write_mlp
from treadle.graph.moe_body import write_moe
from treadle.graph.residual_body import Flow, SumFlow, flow_of
from treadle.graph.scan_body import write_decay_attention, write_rglru, write_rwkv4
from treadle.graph.spec import (
    Attention,
    Branch,
    Csa,
    DecayAttention,
    Delta,
    Layer,
    Mamba1,
    Mamba2,
    Mla,
    Mlp,
    Moe,
    Norm,
    Op,
    Rglru,
    Rwkv4,
    ShortConv,
    SpecError,
    Sub,
)
from treadle.graph.weights import Ints

WRITERS: dict[type[Any], Callable[..., Node]] = {
    Attention: lambda writer, op, _, h, path, name: write_attention(writer, op, h, path, name),
    Mla: lambda writer, op, _, h, path, name: write_mla(writer, op, h, path, name),
    Mlp: lambda writer, op, _, h, path, name: write_mlp(writer, op, h, path, name),
    Moe: lambda writer, op, x, h, path, name: write_moe(writer, op, x, h, path, name),
    Delta: lambda writer, op, _, h, path, name: write_delta(writer, op, h, path, name),
    Mamba2: lambda writer, op, _, h, path, name: write_mamba2(writer, op, h, path, name),
    Mamba1: lambda writer, op, _, h, path, name: write_mamba1(writer, op, h, path, name),
    ShortConv: lambda writer, op, _, h, path, name: write_short_conv(writer, op, h, path, name),
    Csa: lambda writer, op, _, h, path, name: write_csa(writer, op, h, path, name),
    DecayAttention: lambda writer, op, _, h, path, name: write_decay_attention(writer, op, h, path, name),
    Rglru: lambda writer, op, _, h, path, name: write_rglru(writer, op, h, path, name),
    Rwkv4: lambda writer, op, _, h, path, name: write_rwkv4(writer, op, h, path, name),
}
"""Takes the writer, the op, the residual stream and the op's input [T, C] each, the path of its weights and a name;
returns its output [T, C]."""


def write_layer(
    writer: LayerWriter, layer: Layer, next_norm: Norm | None, next_path: str, snapshots: int = 0
) -> dict[str, Node]:
    """Write (x, h) -> (x, h): h is x as normed for this layer, then for what follows it.

    With other residual topologies than one sum, what flows -> what flows: graph.residual_body.
    """
    spec = writer.model.spec
    flow = flow_of(writer, snapshots)
    values: dict[str, Node] = {}
    ready = writer.stream("h", spec.hidden) if isinstance(flow, SumFlow) else None
    for index, sub in enumerate(layer.subs):
        path = f"layers.{layer.index}.{sub.name}"
        h = _input(writer, flow, sub, path, values, ready if index == 0 and sub.pre is not None else None)
        _write_sub(writer, flow, sub, h, path, values)
    if isinstance(flow, SumFlow):
        flow.x = _behind(writer, flow.x, layer.index)
        return {**flow.outputs(), "h": writer.norm(next_norm, flow.x, next_path, "next_norm"), **writer.passed_on}
    refuse(f"residual.kind = {spec.residual.kind}", {"per_layer_input": spec.per_layer_input})
    refuse(f"residual.kind = {spec.residual.kind}", {"layers.scalar": spec.layer_scalar})
    return {**flow.outputs(), **writer.passed_on}


def _input(
    writer: LayerWriter, flow: Flow, sub: Sub, path: str, values: Mapping[str, Node], ready: Node | None
) -> Node:
    """Return what a sublayer's op reads: a tap, or the residual stream behind its norm."""
    if sub.input != "hidden":
        raise SpecError(f"{path}: input = {sub.input!r} has no kernels yet")
    if sub.source is not None:
        return _value(values, sub.source, f"{path}.from")
    if ready is not None:
        return ready
    return writer.norm(sub.pre, flow.read(sub, path), f"{path}.pre", f"{sub.name}_pre")


def _value(values: Mapping[str, Node], name: str, where: str) -> Node:
    """Return what an earlier sublayer left under ``name``. Raises: SpecError naming the nearest."""
    if name not in values:
        raise SpecError("no sublayer before taps or holds this", key=where, value=name, nearest=nearest(name, values))
    return values[name]


def _write_sub(writer: LayerWriter, flow: Flow, sub: Sub, h: Node, path: str, values: dict[str, Node]) -> None:
    """Write a sublayer: its result goes to what flows, or is held for a later one."""
    if sub.tap is not None:
        values[sub.tap] = h
    plain = sub.post is None and sub.hold is None and sub.add is None and not sub.post_conv
    if isinstance(flow, SumFlow) and sub.op is None and plain:
        # each branch is added by itself, so that it may join its product
        kept = flow.kept(sub, h)
        flow.replace(sub, _add_branches(writer, sub, kept, (flow.x, h), path, sub.skip_scale, sub.out_scale), path)
        return
    if sub.op is not None:
        y = _write_op(writer, sub.op, flow.x, h, path, sub.name)
    else:
        y = _add_branches(writer, sub, None, (flow.x, h), path, 1.0, 1.0)
    y = writer.norm(sub.post, y, f"{path}.post", f"{sub.name}_post")
    if sub.post_conv:
        model = writer.model
        states = kept_behind(sub, model.spec.hidden, Weights(path, model.tensors, model.options.dtype))
        (memory,) = writer.keep_states(states, path)
        y = writer.added_conv(y, memory, f"{path}.post_conv", memory.name.replace("post_conv", "behind"))
    if sub.hold is not None:
        values[sub.hold] = y
        return
    if sub.add is not None:
        y = writer.op("add", y, _value(values, sub.add, f"{path}.add"), label=f"{sub.name}_with_{sub.add}")
    flow.write(sub, y, path, h)


def _behind(writer: LayerWriter, x: Node, layer: int) -> Node:
    """Return the stream behind a layer's sublayers: with its per-layer input added, and times its scalar."""
    spec = writer.model.spec
    path = f"layers.{layer}.ple"
    if spec.per_layer_input is not None:
        given = spec.per_layer_input
        every = writer.stream("per_layer", len(spec.layers), given.dim)
        chosen = writer.choose(every, 1, writer.bind("layer_index", Ints((layer,))), "layer_input")
        gate = writer.linear(x, f"{path}.gate", "ple_gate")
        y = writer.op("act_mul", gate, writer.view(chosen, (-1, given.dim), "layer_input_row"), given.act, label="ple")
        y = writer.norm(given.norm, writer.linear(y, f"{path}.proj", "ple_proj"), f"{path}.post", "ple_post")
        x = writer.op("add", x, y, label="ple_residual")
    if spec.layer_scalar:
        x = writer.op("multiply", x, writer.weight(f"layers.{layer}.scalar", "scalar"), label="scaled")
    return x


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
