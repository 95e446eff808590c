"""The ops of recurrences of single families: Lightning attention, gated linear units, RWKV."""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter
from treadle.graph.recurrent_body import short_conv
from treadle.graph.spec import DecayAttention, Rglru, Rwkv4
from treadle.graph.weights import Runs


def write_decay_attention(writer: LayerWriter, op: DecayAttention, h: Node, path: str, name: str) -> Node:
    """Append o(sigmoid(gate h) * out_norm(decay_scan(act(q h), act(k h), act(v h))))."""
    (memory,) = writer.keep(op, path)
    parts = []
    for part in "qkv":
        x = writer.linear(h, f"{path}.{part}", f"{name}_{part}")
        x = writer.op("activation", x, op.act, label=f"{name}_{part}_act")
        parts.append(writer.view(x, (-1, op.heads, op.head_dim), f"{name}_{part}_heads"))
    runs = tuple((1, -op.rate * 2.0 ** (-8.0 / op.heads * (head + 1))) for head in range(op.heads))
    rates = writer.bind(f"{name}_rates", Runs(runs, "float32"))
    o = writer.op("decay_scan", *parts, rates, *writer.state_tail(memory), label=f"{name}_scan")
    o = writer.view(o, (-1, op.heads * op.head_dim), f"{name}_out")
    o = writer.norm(op.out_norm, o, f"{path}.out_norm", f"{name}_out_norm")
    gate = writer.linear(h, f"{path}.gate", f"{name}_gate")
    return writer.linear(writer.op("act_mul", gate, o, "sigmoid", label=f"{name}_gated"), f"{path}.o", f"{name}_o")


def write_rglru(writer: LayerWriter, op: Rglru, h: Node, path: str, name: str) -> Node:
    """Append o(act(y h) * rglru(conv(x h))), whose gates see one head's channels each."""
    conv, memory = writer.keep(op, path)
    x = short_conv(writer, writer.linear(h, f"{path}.x", f"{name}_x"), conv, path, ("conv",), "none", f"{name}_conv")
    heads = writer.view(x, (-1, op.heads, op.width // op.heads), f"{name}_heads")
    gates, biases = [], []
    for part in ("in_gate", "a_gate"):
        weight = writer.weight(f"{path}.{part}.weight", f"{name}_{part}_weight")
        gate = writer.op("head_linear", heads, weight, label=f"{name}_{part}_heads")
        gates.append(writer.view(gate, (-1, op.width), f"{name}_{part}"))
        biases.append(writer.weight(f"{path}.{part}.bias", f"{name}_{part}_bias"))
    param = writer.weight(f"{path}.param", f"{name}_param")
    states = writer.op("rglru", x, *gates, *biases, param, *writer.state_tail(memory), label=f"{name}_states")
    y = writer.linear(h, f"{path}.y", f"{name}_y")
    return writer.linear(writer.op("act_mul", y, states, op.act, label=f"{name}_gated"), f"{path}.o", f"{name}_o")


def write_rwkv4(writer: LayerWriter, op: Rwkv4, h: Node, path: str, name: str) -> Node:
    """Append one half of a layer: the mixing of time, o(sigmoid(r) * wkv(k, v)), or that of channels."""
    shift, *more = writer.keep(op, path)
    before = writer.op("token_shift", h, *writer.state_tail(shift), label=f"{name}_before")

    def mixed(part: str) -> Node:
        share = writer.weight(f"{path}.mix_{part}", f"{name}_mix_{part}")
        x = writer.op("blend", h, before, share, label=f"{name}_{part}_in")
        return writer.linear(x, f"{path}.{part}", f"{name}_{part}")

    r, k = mixed("r"), mixed("k")
    if op.part == "channel":
        k = writer.op("activation", k, "relu2", label=f"{name}_act")
        v = writer.linear(k, f"{path}.v", f"{name}_v")
        return writer.op("act_mul", r, v, "sigmoid", label=f"{name}_gated")
    (memory,) = more
    decay = writer.float32(f"{path}.decay", f"{name}_decay")
    first = writer.float32(f"{path}.first", f"{name}_first")
    o = writer.op("wkv", k, mixed("v"), decay, first, *writer.state_tail(memory), label=f"{name}_wkv")
    return writer.linear(writer.op("act_mul", r, o, "sigmoid", label=f"{name}_gated"), f"{path}.o", f"{name}_o")
