"""The ops of a mixture of experts: the router, the experts it chooses, and what every token visits beside them."""

from __future__ import annotations

import torch
from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.mlp_body import write_mlp
from treadle.graph.spec import Moe, Router, Shared, SpecError
from treadle.graph.weights import Concat, Leaf, WeightExpr

LOWEST = -3.4e38
"""stands for minus infinity in a schema"""
_LATER = ("inner_norm", "sparsity", "learned_scale")


def write_moe(writer: LayerWriter, op: Moe, x: Node, h: Node, path: str, name: str) -> Node:
    """Append a mixture over ``h`` [T, C], the normed residual stream ``x``."""
    later = {field: getattr(op, field) for field in _LATER} | {"router.hash": op.router.hash}
    refuse(path, {**later, "gate_scale": op.gate_scale != 1.0 and op.gate_scale, "act": op.act == "xielu" and op.act})
    weights, ids = _route(writer, op, x if op.router.input == "residual" else h, path, name)
    inputs = writer.norm(op.pre, x, f"{path}.expert_pre", f"{name}_expert_pre") if op.pre is not None else h
    if op.latent is not None:
        inputs = writer.linear(inputs, f"{path}.latent_in", f"{name}_latent_in")
    y = _experts(writer, op, inputs, weights, ids, path, name)
    if op.zero_experts:
        first = op.experts
        same = writer.op("identity_experts", inputs, weights, ids, first, label=f"{name}_identity")
        y = writer.op("add", y, same, label=f"{name}_with_identity")
    if op.latent is not None:
        y = writer.norm(op.latent.norm, y, f"{path}.latent_norm", f"{name}_latent_norm")
        y = writer.linear(y, f"{path}.latent_out", f"{name}_latent_out")
    y = writer.affine(y, scale=op.out_scale, label=f"{name}_out_scale")
    if op.shared is not None:
        shared = _shared(writer, op.shared, h, path, name)
        share = 0.5 if op.shared.combine == "average" else 1.0
        y = writer.op("add", y, shared, share, share, label=f"{name}_with_shared")
    return writer.norm(op.post, y, f"{path}.expert_post", f"{name}_expert_post")


def _shared(writer: LayerWriter, op: Shared, h: Node, path: str, name: str) -> Node:
    """Return what the expert that every token visits gives, times its gate if it has one."""
    y = write_mlp(writer, op, h, f"{path}.shared", f"{name}_shared")
    if not op.gate:
        return y
    gate = writer.linear(h, f"{path}.shared_gate", f"{name}_share")
    width = writer.model.spec.hidden
    y = writer.op(
        "gate_heads",
        writer.view(y, (-1, 1, width), f"{name}_shared_out"),
        gate,
        "sigmoid",
        label=f"{name}_shared_gated",
    )
    return writer.view(y, (-1, width), f"{name}_shared_share")


def _route(writer: LayerWriter, op: Moe, x: Node, path: str, name: str) -> tuple[Node, Node]:
    """Return weights and ids of every token's experts, [T, k] each."""
    router = op.router
    if router.input_norm is not None:
        norm = router.input_norm
        scale = writer.weight(f"{path}.in_scale", f"{name}_in_scale")
        x = writer.op(
            "norm", x, scale, None, norm.kind, norm.eps, norm.plus_one, norm.groups, norm.cast, label=f"{name}_in_norm"
        )
        x = writer.affine(x, scale=writer.model.spec.hidden**-0.5, label=f"{name}_in_scaled")
    logits = _logits(writer, router, x, path, name)
    groups = router.groups
    chosen = writer.op(
        "route",
        logits,
        writer.float32(f"{path}.correction", f"{name}_correction") if router.correction else None,
        writer.float32(f"{path}.expert_scale", f"{name}_expert_scale") if router.per_expert_scale else None,
        op.top_k,
        "sparsemixer" if router.sparsemixer else router.score,
        router.score_after_topk,
        groups.n if groups else 1,
        groups.topk if groups else 1,
        groups.score if groups else "max",
        max(groups.fill, LOWEST) if groups else LOWEST,
        router.normalize,
        router.norm_eps,
        router.norm_min,
        router.scale,
        router.softcap,
        router.sparsemixer,
        router.always,
        label=f"{name}_route",
    )
    return writer.item(chosen, 0, f"{name}_weights"), writer.item(chosen, 1, f"{name}_ids")


def _logits(writer: LayerWriter, router: Router, x: Node, path: str, name: str) -> Node:
    if router.dtype == "model":
        return writer.linear(x, f"{path}.router", f"{name}_router")
    if writer.model.dtype != torch.float32:
        x = writer.call(torch.ops.aten._to_copy.default, x, dtype=torch.float32, label=f"{name}_router_in")
    weight = writer.float32(f"{path}.router.weight", f"{name}_router_weight")
    bias = f"{path}.router.bias"
    given = writer.float32(bias, f"{name}_router_bias") if bias in writer.model.tensors else None
    return writer.op("linear", x, weight, given, label=f"{name}_router")


def _experts(writer: LayerWriter, op: Moe, x: Node, weights: Node, ids: Node, path: str, name: str) -> Node:
    up = ("gate", "up") if op.gated else ("up",)
    return writer.op(
        "experts",
        x,
        weights,
        ids,
        _stack(writer, op, path, up, f"{name}_experts_up"),
        _stack(writer, op, path, tuple(f"{part}_bias" for part in up), f"{name}_experts_up_bias"),
        _stack(writer, op, path, ("down",), f"{name}_experts_down"),
        _stack(writer, op, path, ("down_bias",), f"{name}_experts_down_bias"),
        op.act,
        op.gated,
        op.limit or 0.0,
        op.alpha,
        op.beta or 0.0,
        op.linear_beta or 0.0,
        op.apply == "input",
        label=f"{name}_experts",
    )


def _stack(writer: LayerWriter, op: Moe, path: str, parts: tuple[str, ...], name: str) -> Node | None:
    """Return the input that holds one matrix (or bias) an expert: the rows of ``parts`` one below the other.

    None where the checkpoint has no such tensors.
    """
    if f"{path}.{parts[0]}" not in writer.model.tensors:
        if parts[0].endswith("bias"):
            return None
        raise SpecError(f"the checkpoint has no {path}.{parts[0]}")
    columns = tuple(_all_experts(writer, op, path, part) for part in parts)
    return writer.bind(name, columns[0] if len(columns) == 1 else Concat(columns, 1))


def _all_experts(writer: LayerWriter, op: Moe, path: str, part: str) -> WeightExpr:
    names = [f"{path}.{part}", *([f"{path}.always_{part}"] if op.router.always else [])]
    dtype = writer.model.options.dtype
    made = tuple(Leaf(name, tuple(writer.model.tensors[name].shape), dtype) for name in names)
    return made[0] if len(made) == 1 else Concat(made, 0)
