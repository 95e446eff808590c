"""The ops of a gated delta rule: projections, short convolutions, decays, the recurrence, and the gated norm behind."""

from __future__ import annotations

import torch
from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter
from treadle.graph.recurrent_body import decay_rates, gated_norm, joined_linear, short_conv, split
from treadle.graph.spec import Delta


def write_delta(writer: LayerWriter, op: Delta, h: Node, path: str, name: str) -> Node:
    """Append o(out_norm(delta_rule(q, k, v), z)), q, k and v behind a short convolution."""
    conv, memory = writer.keep(op, path)
    mixed = joined_linear(writer, h, path, "qkv", f"{name}_qkv")
    mixed = short_conv(writer, mixed, conv, path, ("q_conv", "k_conv", "v_conv"), op.act, f"{name}_conv")
    heads = ((op.k_heads, op.k_dim), (op.k_heads, op.k_dim), (op.v_heads, op.v_dim))
    q, k, v = (
        writer.view(t, (-1, *shape), f"{name}_{part}_heads")
        for t, shape, part in zip(split(writer, mixed, op.channels, "qkv", name), heads, "qkv")
    )
    decay, beta = _decay(writer, op, h, path, name), _beta(writer, op, h, path, name)
    tail = writer.state_tail(memory)
    o = writer.op("delta_rule", q, k, v, decay, beta, *tail, op.k_dim**-0.5, True, label=f"{name}_delta")
    z = _maybe_narrow(writer, h, op.gate_rank, f"{path}.z", f"{name}_z")
    z = writer.view(z, (-1, op.v_heads, op.v_dim), f"{name}_z_heads")
    o = gated_norm(writer, op.out_norm, o, z, f"{path}.out_norm", f"{name}_out_norm")
    return writer.linear(writer.view(o, (-1, op.v_heads * op.v_dim), f"{name}_out"), f"{path}.o", f"{name}_o")


def _decay(writer: LayerWriter, op: Delta, h: Node, path: str, name: str) -> Node:
    """Return logarithms of decays in float32, [T, Hv] or [T, Hv, Dk]."""
    x = _maybe_narrow(writer, h, op.decay_rank, f"{path}.decay", f"{name}_decay_in")
    bias = writer.float32(f"{path}.dt_bias", f"{name}_dt_bias")
    if op.decay == "channel":
        x = writer.view(x, (-1, op.v_heads, op.k_dim), f"{name}_decay_heads")
        bias = writer.view(bias, (op.v_heads, op.k_dim), f"{name}_dt_bias_heads")
    rates = decay_rates(writer, path, name)
    return writer.op("log_decay", x, rates, bias, op.decay_floor or 0.0, label=f"{name}_decay")


def _beta(writer: LayerWriter, op: Delta, h: Node, path: str, name: str) -> Node:
    """Return how much of a correction is learned, in float32: [T, Hv]."""
    beta = writer.op("activation", writer.linear(h, f"{path}.beta", f"{name}_beta_in"), "sigmoid", label=f"{name}_beta")
    beta = writer.affine(beta, scale=op.beta_scale, label=f"{name}_beta_scaled")
    if writer.model.dtype == torch.float32:
        return beta
    return writer.call(torch.ops.aten._to_copy.default, beta, dtype=torch.float32, label=f"{name}_beta_wide")


def _maybe_narrow(writer: LayerWriter, h: Node, narrow: bool, path: str, name: str) -> Node:
    if not narrow:
        return writer.linear(h, path, name)
    return writer.linear(writer.linear(h, f"{path}_a", f"{name}_a"), f"{path}_b", f"{name}_b")
