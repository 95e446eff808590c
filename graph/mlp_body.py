"""The ops of a dense feed-forward."""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.expected import XIELU
from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Feedforward

_GATED_ONLY = ("swiglu_oai", "situ")
_LATER = ("sparsity",)


def write_mlp(writer: LayerWriter, op: Feedforward, h: Node, path: str, name: str) -> Node:
    """Append out_scale * down(inner_norm(act(gate_scale * gate h) * up h)), or down(inner_norm(act(up h)))."""
    limited = op.act in _GATED_ONLY or bool(op.limit)
    refuse(path, {field: getattr(op, field) for field in _LATER} | {"act": limited and not op.gated and op.act})
    if op.gated:
        gate = writer.linear(h, f"{path}.gate", f"{name}_gate")
        gate = writer.affine(gate, scale=op.gate_scale, label=f"{name}_gate_scale")
        up = writer.linear(h, f"{path}.up", f"{name}_up")
        if limited:
            options = (op.limit or 0.0, op.alpha, op.beta or 0.0, op.linear_beta or 0.0)
            hidden = writer.op("glu", gate, up, op.act, *options, label=f"{name}_act")
        else:
            hidden = writer.op("act_mul", gate, up, op.act, label=f"{name}_act")
    else:
        up = writer.linear(h, f"{path}.up", f"{name}_up")
        if op.act == "xielu":
            parts = [writer.weight(f"{path}.{part}", f"{name}_{part}") for part in XIELU]
            hidden = writer.op("xielu", up, *parts, label=f"{name}_act")
        else:
            hidden = writer.op("activation", up, op.act, label=f"{name}_act")
    hidden = writer.norm(op.inner_norm, hidden, f"{path}.inner_norm", f"{name}_inner_norm")
    down = writer.linear(hidden, f"{path}.down", f"{name}_down")
    if op.learned_scale:
        down = writer.op(
            "multiply", down, writer.weight(f"{path}.global_scale", f"{name}_scale"), label=f"{name}_scaled"
        )
    return writer.affine(down, scale=op.out_scale, label=f"{name}_out_scale")
