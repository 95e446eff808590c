"""From a model description to a MODEL-level graph: what the model computes, with nothing of the hardware in it.

Bodies are cut behind the norm that opens a layer, so that a residual add and the norm that reads it stand in one body:
embed -> (x, h), layer: (x, h) -> (x, h) with h normed for the next layer, head: h -> logits. Layers that compute the
same thing share one body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch.fx import Node

from treadle.graph.body import BodyWriter
from treadle.graph.ir import Body, Call, Graph, Level, Role, Shapes
from treadle.graph.moe_body import GATED_ONLY, write_moe
from treadle.graph.spec import Attention, Feedforward, Layer, Mlp, ModelSpec, Moe, Norm, SpecError, Sub
from treadle.graph.state import LayerKV, PagedKV
from treadle.graph.weights import Leaf, RopeRows, WeightExpr


class TensorLike(Protocol):
    """Anything that knows the shape of a canonical weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What the graph needs beside the model: element type, longest sequence (rows of rope tables), page size."""

    dtype: str
    max_len: int
    page_tokens: int


def build(spec: ModelSpec, tensors: Mapping[str, TensorLike], options: BuildOptions) -> Graph:
    """Return the graph of ``spec`` over the canonical ``tensors`` (biases exist where their tensor does).

    Raises: SpecError naming the layer and field, for a primitive that has no op yet.
    """
    return _ModelBuilder(spec, tensors, options).build()


class _ModelBuilder:
    """Holds what all bodies share while they are written."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, TensorLike], options: BuildOptions) -> None:
        self.spec, self.tensors, self.options = spec, tensors, options
        self.shapes = Shapes()
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.bodies: dict[str, Body] = {}
        self._by_key: dict[object, str] = {}
        self.kv_layers: list[LayerKV] = []

    def build(self) -> Graph:
        layers = self.spec.layers
        calls = [self._embed(layers[0])]
        for index, layer in enumerate(layers):
            calls.append(self._layer(layer, layers[index + 1] if index + 1 < len(layers) else None))
        calls.append(self._head())
        state = PagedKV(
            name="kv", layers=tuple(self.kv_layers), dtype=self.options.dtype, page_tokens=self.options.page_tokens
        )
        return Graph(
            level=Level.MODEL, bodies=self.bodies, calls=tuple(calls), state=state, dtype=self.dtype, shapes=self.shapes
        )

    def _embed(self, first: Layer) -> Call:
        embed = self.spec.embed
        _refuse("embed", {"positions": embed.positions, "project": embed.project})
        writer = LayerWriter(self)
        x = writer.op(
            "embed", writer.step("token_ids"), writer.weight("embed.weight", "embed_weight"), embed.scale, label="embed"
        )
        x = writer.norm(embed.norm, x, "embed.norm", "embed_norm")
        h = writer.norm(first.subs[0].pre, x, f"layers.{first.index}.{first.subs[0].name}.pre", "next_norm")
        body = writer.finish("embed", {"x": x, "h": h})
        self.bodies["embed"] = body
        return Call(body="embed", layer=None, weights=writer.bound)

    def _layer(self, layer: Layer, following: Layer | None) -> Call:
        next_norm = following.subs[0].pre if following is not None else self.spec.final_norm
        next_path = f"layers.{following.index}.{following.subs[0].name}.pre" if following is not None else "final_norm"
        prefix = f"layers.{layer.index}."
        present = {name.removeprefix(prefix): t.shape for name, t in self.tensors.items() if name.startswith(prefix)}
        key = (msgspec.json.encode(layer.subs), msgspec.json.encode(next_norm), tuple(sorted(present.items())))
        known = self._by_key.get(key)
        writer = LayerWriter(self)
        outputs, slot = _write_layer(writer, layer, next_norm, next_path)
        if known is None:
            known = self._by_key[key] = f"layer{len(self._by_key)}"
            self.bodies[known] = writer.finish(known, outputs)
        return Call(body=known, layer=layer.index, weights=writer.bound, state_slot=slot)

    def _head(self) -> Call:
        head = self.spec.head
        writer = LayerWriter(self)
        h = writer.stream("h", self.spec.hidden)
        rows = writer.call(torch.ops.aten.index_select.default, h, 0, writer.step("logit_rows"), label="rows")
        rows = writer.affine(rows, scale=head.in_scale, label="head_in")
        weight = "embed.weight" if head.tied else "head.weight"
        logits = writer.op(
            "linear",
            rows,
            writer.weight(weight, "head_weight"),
            writer.optional("head.bias", "head_bias"),
            label="head",
        )
        logits = writer.affine(logits, scale=head.scale, softcap=head.softcap, label="head_out")
        self.bodies["head"] = writer.finish("head", {"logits": logits})
        return Call(body="head", layer=None, weights=writer.bound)

    def add_kv(self, layer: LayerKV) -> int:
        """Return the slot of a new layer of the paged KV state."""
        self.kv_layers.append(layer)
        return len(self.kv_layers) - 1


class LayerWriter(BodyWriter):
    """A body writer that binds canonical weights to inputs as they are first used."""

    def __init__(self, model: _ModelBuilder) -> None:
        super().__init__(model.shapes)
        self.model = model
        self.bound: dict[str, WeightExpr] = {}
        self.slot: int | None = None

    def stream(self, name: str, width: int) -> Node:
        """Return the input that carries ``name`` from the call before, [T, width]."""
        return self.input(name, Role.STREAM, ("T", width), self.model.dtype)

    def weight(self, canonical: str, name: str) -> Node:
        """Return the input bound to a canonical weight, in the model's dtype."""
        tensor = self.model.tensors.get(canonical)
        if tensor is None:
            raise SpecError(f"the checkpoint has no {canonical}")
        return self.bind(name, Leaf(canonical, tuple(tensor.shape), self.model.options.dtype))

    def optional(self, canonical: str, name: str) -> Node | None:
        """Return the same, or None where the checkpoint has no such tensor."""
        return self.weight(canonical, name) if canonical in self.model.tensors else None

    def bind(self, name: str, expr: WeightExpr) -> Node:
        """Return the input ``name``, bound to ``expr`` in this call."""
        assert self.bound.setdefault(name, expr) == expr, f"two weights called {name}"
        return self.input(name, Role.WEIGHT, expr.shape, getattr(torch, expr.dtype))

    def norm(self, norm: Norm | None, x: Node, path: str, name: str) -> Node:
        """Append a norm over the last dim; None leaves x as it is."""
        if norm is None:
            return x
        _refuse(path, {"gate_act": norm.gate_act, "low_rank_gate": norm.low_rank_gate})
        weight = self.optional(f"{path}.weight", f"{name}_weight")
        bias = self.optional(f"{path}.bias", f"{name}_bias")
        return self.op("norm", x, weight, bias, norm.kind, norm.eps, norm.plus_one, norm.groups, norm.cast, label=name)

    def linear(self, x: Node, path: str, name: str) -> Node:
        """Append x W^T + b."""
        weight, bias = self.weight(f"{path}.weight", f"{name}_weight"), self.optional(f"{path}.bias", f"{name}_bias")
        return self.op("linear", x, weight, bias, label=name)

    def affine(self, x: Node, *, label: str, scale: float = 1.0, softcap: float = 0.0, clip: float = 0.0) -> Node:
        """Append a clip, a scale and a softcap; nothing where all are off."""
        if scale == 1.0 and not softcap and not clip:
            return x
        return self.op("affine", x, scale, softcap, clip, label=label)


def _write_layer(
    writer: LayerWriter, layer: Layer, next_norm: Norm | None, next_path: str
) -> tuple[dict[str, Node], int | None]:
    hidden = writer.model.spec.hidden
    x = writer.stream("x", hidden)
    h = writer.stream("h", hidden)
    for index, sub in enumerate(layer.subs):
        path = f"layers.{layer.index}.{sub.name}"
        if index:
            h = writer.norm(sub.pre, x, f"{path}.pre", f"{sub.name}_pre")
        elif sub.pre is None:
            h = x
        y = _write_sub(writer, sub, x, h, path)
        y = writer.norm(sub.post, y, f"{path}.post", f"{sub.name}_post")
        x = writer.op("add", x, y, sub.skip_scale, sub.out_scale, label=f"{sub.name}_residual")
    h = writer.norm(next_norm, x, next_path, "next_norm")
    return {"x": x, "h": h}, writer.slot


def _write_sub(writer: LayerWriter, sub: Sub, x: Node, h: Node, path: str) -> Node:
    _refuse(path, {name: getattr(sub, name) for name in _LATER_SUB})
    match sub.op:
        case Attention():
            return _write_attention(writer, sub.op, h, path, sub.name)
        case Mlp():
            return _write_mlp(writer, sub.op, h, path, sub.name)
        case Moe():
            return write_moe(writer, sub.op, x, h, path, sub.name, _write_mlp)
        case _:
            raise SpecError(
                f"{path}: op {type(sub.op).__name__.lower()} has no kernels yet; there are attention, mlp and moe"
            )


_LATER_SUB = ("branches", "post_residual", "tap", "source", "hold", "add", "post_conv", "snapshot")
_LATER_ATTENTION = (
    "chunk", "v_norm", "out_norm", "gate", "alibi", "q_temperature", "v_from_k", "kv_from", "k_conv", "rel", "diff",
    "index",
)  # fmt: skip
_LATER_MLP = ("limit", "beta", "linear_beta", "inner_norm", "sparsity", "learned_scale")


def _write_attention(writer: LayerWriter, op: Attention, h: Node, path: str, name: str) -> Node:
    _refuse(path, {field: getattr(op, field) for field in _LATER_ATTENTION})
    q, k, v = (writer.linear(h, f"{path}.{part}", f"{name}_{part}") for part in "qkv")
    if op.qk_norm is not None and op.qk_norm.scope == "full":
        q, k = (writer.norm(op.qk_norm, t, f"{path}.{p}_norm", f"{name}_{p}_norm") for t, p in ((q, "q"), (k, "k")))
    k, v = (
        writer.affine(k, scale=op.k_scale, label=f"{name}_k_scale"),
        writer.affine(v, scale=op.v_scale, label=f"{name}_v_scale"),
    )
    q, k, v = (writer.affine(t, clip=op.clip, label=f"{name}_{p}_clip") for t, p in zip((q, k, v), "qkv"))
    q = writer.view(q, (-1, op.heads, op.head_dim), f"{name}_q_heads")
    k = writer.view(k, (-1, op.kv_heads, op.head_dim), f"{name}_k_heads")
    v = writer.view(v, (-1, op.kv_heads, op.v_head_dim), f"{name}_v_heads")
    q, k = (_position(writer, op, t, path, f"{name}_{p}", p) for t, p in ((q, "q"), (k, "k")))
    sinks = writer.weight(f"{path}.sinks", f"{name}_sinks") if op.sinks else None
    writer.slot = writer.model.add_kv(LayerKV(kv_heads=op.kv_heads, k_dim=op.head_dim, v_dim=op.v_head_dim))
    kv = writer.input("kv", Role.STATE, ("B", "L", op.kv_heads, op.head_dim + op.v_head_dim), writer.model.dtype)
    steps = [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]
    o = writer.op("attention", q, k, v, kv, *steps, sinks, op.scale, op.window, op.softcap, label=f"{name}_attention")
    o = writer.view(o, (-1, op.heads * op.v_head_dim), f"{name}_out")
    return writer.linear(o, f"{path}.o", f"{name}_o")


def _position(writer: LayerWriter, op: Attention, x: Node, path: str, name: str, part: str) -> Node:
    """Append per-head norm and rope in the order that ``op`` gives them."""
    norm = op.qk_norm if op.qk_norm is not None and op.qk_norm.scope == "head" else None
    if norm is not None and not norm.after_rope:
        x = writer.norm(norm, x, f"{path}.{part}_norm", f"{name}_norm")
    if op.rope is not None:
        table = writer.bind("rope_table", RopeRows(op.rope, writer.model.options.max_len))
        x = writer.op("rope", x, writer.step("positions"), table, op.layout, op.rope_at, label=f"{name}_rope")
    if norm is not None and norm.after_rope:
        x = writer.norm(norm, x, f"{path}.{part}_norm", f"{name}_norm")
    return x


def _write_mlp(writer: LayerWriter, op: Feedforward, h: Node, path: str, name: str) -> Node:
    _refuse(path, {field: getattr(op, field) for field in _LATER_MLP} | {"act": op.act in GATED_ONLY and op.act})
    if op.gated:
        gate = writer.linear(h, f"{path}.gate", f"{name}_gate")
        gate = writer.affine(gate, scale=op.gate_scale, label=f"{name}_gate_scale")
        hidden = writer.op("act_mul", gate, writer.linear(h, f"{path}.up", f"{name}_up"), op.act, label=f"{name}_act")
    else:
        hidden = writer.op("activation", writer.linear(h, f"{path}.up", f"{name}_up"), op.act, label=f"{name}_act")
    return writer.affine(
        writer.linear(hidden, f"{path}.down", f"{name}_down"), scale=op.out_scale, label=f"{name}_out_scale"
    )


def _refuse(path: str, fields: Mapping[str, Any]) -> None:
    """Raise for a field that asks for a primitive which has no op yet."""
    for name, value in fields.items():
        if value:
            raise SpecError(f"{path}: {name} = {value!r} has no kernels yet")
