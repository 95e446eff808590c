"""The ops of state-space mixers: projections, a short convolution, step sizes, the scan, and the gate behind it."""

from __future__ import annotations

from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter
from treadle.graph.recurrent_body import decay_rates, gated_norm, joined_linear, short_conv, split
from treadle.graph.spec import Mamba1, Mamba2
from treadle.graph.weights import Runs

LARGEST = 3.4e38
"""stands for infinity in a schema"""


def write_mamba2(writer: LayerWriter, op: Mamba2, h: Node, path: str, name: str) -> Node:
    """Append o(out_norm(ssm_scan(x, dt, A, B, C, D), z)), x, B and C behind a short convolution."""
    conv, memory = writer.keep(op, path)
    h = writer.affine(h, scale=op.in_scale, label=f"{name}_in_scale")
    z_scale, *scales, dt_scale = op.in_scales
    mixed = joined_linear(writer, h, path, ("xbc",), f"{name}_xbc")
    if set(scales) != {1.0}:
        vector = writer.bind(f"{name}_scales", Runs(tuple(zip(op.channels, scales)), writer.model.options.dtype))
        mixed = writer.op("multiply", mixed, vector, label=f"{name}_xbc_scaled")
    mixed = short_conv(writer, mixed, conv, path, ("conv",), op.act, f"{name}_conv")
    x, keys, queries = split(writer, mixed, op.channels, "xbc", name)
    x = writer.view(x, (-1, op.heads, op.head_dim), f"{name}_x_heads")
    keys, queries = (
        writer.view(t, (-1, op.groups, op.state), f"{name}_{part}_groups") for t, part in ((keys, "b"), (queries, "c"))
    )
    dt = writer.affine(writer.linear(h, f"{path}.dt", f"{name}_dt_in"), scale=dt_scale, label=f"{name}_dt_scaled")
    low, high = op.dt_limit or (0.0, LARGEST)
    bias = writer.float32(f"{path}.dt_bias", f"{name}_dt_bias")
    dt = writer.op("time_step", dt, bias, low, min(high, LARGEST), label=f"{name}_dt")
    skip = writer.float32(f"{path}.D", f"{name}_skip")
    y = writer.op(
        "ssm_scan", x, dt, decay_rates(writer, path, name), keys, queries, skip, *writer.state_tail(memory),
        label=f"{name}_scan",
    )  # fmt: skip
    y = writer.view(y, (-1, op.inner), f"{name}_out")
    z = writer.affine(writer.linear(h, f"{path}.z", f"{name}_z"), scale=z_scale, label=f"{name}_z_scaled")
    if op.out_norm is None:
        y = writer.op("act_mul", z, y, "silu", label=f"{name}_gated")
    else:
        y = gated_norm(writer, op.out_norm, y, z, f"{path}.out_norm", f"{name}_out_norm")
    return writer.linear(y, f"{path}.o", f"{name}_o")


def write_mamba1(writer: LayerWriter, op: Mamba1, h: Node, path: str, name: str) -> Node:
    """Append o(silu(z) * selective_scan(x, dt, A, B, C, D)), dt, B and C made of x behind a short convolution."""
    conv, memory = writer.keep(op, path)
    x = writer.linear(h, f"{path}.x", f"{name}_x")
    z = writer.linear(h, f"{path}.z", f"{name}_z")
    x = short_conv(writer, x, conv, path, ("conv",), op.act, f"{name}_conv")
    dt, keys, queries = (writer.linear(x, f"{path}.{part}", f"{name}_{part.lower()}") for part in ("dt_in", "B", "C"))
    dt, keys, queries = (
        writer.norm(op.inner_norm, t, f"{path}.{part}_norm", f"{name}_{part.lower()}_norm")
        for t, part in ((dt, "dt"), (keys, "B"), (queries, "C"))
    )
    # the bias is added in float32
    dt = writer.op("linear", dt, writer.weight(f"{path}.dt.weight", f"{name}_dt_weight"), None, label=f"{name}_dt_wide")
    dt = writer.op("time_step", dt, writer.float32(f"{path}.dt.bias", f"{name}_dt_bias"), label=f"{name}_dt")
    skip = writer.float32(f"{path}.D", f"{name}_skip")
    y = writer.op(
        "selective_scan", x, dt, decay_rates(writer, path, name), keys, queries, skip, *writer.state_tail(memory),
        label=f"{name}_scan",
    )  # fmt: skip
    return writer.linear(writer.op("act_mul", z, y, "silu", label=f"{name}_gated"), f"{path}.o", f"{name}_o")
