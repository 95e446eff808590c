"""From a model description to a MODEL-level graph: what the model computes, with nothing of the hardware in it.

Bodies are cut behind the norm that opens a layer, so that a residual add and the norm that reads it stand in one body:
embed -> (x, h), layer: (x, h) -> (x, h) with h normed for the next layer, head: h -> logits. Layers that compute the
same thing share one body.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch.fx import Node

from treadle.graph.ir import Body, Call, Graph, Level
from treadle.graph.layer_body import write_layer
from treadle.graph.layer_writer import BuildOptions, LayerWriter, ModelContext, TensorLike, refuse
from treadle.graph.spec import Layer, ModelSpec, SpecError
from treadle.graph.weights import SineRows

__all__ = ["BuildOptions", "TensorLike", "build"]


def build(spec: ModelSpec, tensors: Mapping[str, TensorLike], options: BuildOptions) -> Graph:
    """Return the graph of ``spec`` over the canonical ``tensors`` (biases exist where their tensor does).

    Raises: SpecError naming the layer and field, for a primitive that has no op yet.
    """
    kind = spec.residual.kind
    refuse("residual", {"kind": kind if kind != "add" else None})
    refuse("layers", {"scalar": spec.layer_scalar, "per_layer_input": spec.per_layer_input})
    return _ModelBuilder(ModelContext(spec, tensors, options)).build()


class _ModelBuilder:
    """Collects the bodies, and the calls that bind them."""

    def __init__(self, context: ModelContext) -> None:
        self.context, self.spec = context, context.spec
        self.bodies: dict[str, Body] = {}
        self._by_key: dict[object, str] = {}

    def build(self) -> Graph:
        context, layers = self.context, self.spec.layers
        calls = [self._embed(layers[0])]
        for index, layer in enumerate(layers):
            calls.append(self._layer(layer, layers[index + 1] if index + 1 < len(layers) else None))
        calls.append(self._head())
        return Graph(
            level=Level.MODEL, bodies=self.bodies, calls=tuple(calls), state=context.states.state(),
            dtype=context.dtype, shapes=context.shapes,
        )  # fmt: skip

    def _embed(self, first: Layer) -> Call:
        embed = self.spec.embed
        writer = LayerWriter(self.context)
        weight = writer.weight("embed.weight", "embed_weight")
        x = writer.op("embed", writer.step("token_ids"), weight, embed.scale, label="embed")
        if embed.width:
            x = writer.linear(x, "embed.project", "embed_project")
        x = self._positions(writer, x)
        x = writer.norm(embed.norm, x, "embed.norm", "embed_norm")
        h = writer.norm(first.subs[0].pre, x, f"layers.{first.index}.{first.subs[0].name}.pre", "next_norm")
        self.bodies["embed"] = writer.finish("embed", {"x": x, "h": h})
        return Call(body="embed", layer=None, weights=writer.bound)

    def _positions(self, writer: LayerWriter, x: Node) -> Node:
        """Return x with the vectors of its positions, where the model has them."""
        positions, options = self.spec.embed.positions, self.context.options
        if positions is None:
            return x
        if positions.kind == "learned":
            rows = writer.model.tensors["embed.positions"].shape[0] - positions.offset
            if options.max_len > rows:
                raise SpecError(
                    f"the model knows {rows} positions", key="model.max_len", value=options.max_len,
                    nearest=[f"model.max_len={rows}"],
                )  # fmt: skip
            table = writer.weight("embed.positions", "embed_positions")
        else:
            rows = options.max_len + positions.offset
            table = writer.bind("embed_positions", SineRows(self.spec.hidden, rows, positions.endpoint, options.dtype))
        return writer.op(
            "add_positions", x, writer.step("positions"), table, positions.offset, label="embed_positioned"
        )

    def _layer(self, layer: Layer, following: Layer | None) -> Call:
        next_norm = following.subs[0].pre if following is not None else self.spec.final_norm
        next_path = f"layers.{following.index}.{following.subs[0].name}.pre" if following is not None else "final_norm"
        prefix = f"layers.{layer.index}."
        tensors = self.context.tensors
        present = {name.removeprefix(prefix): t.shape for name, t in tensors.items() if name.startswith(prefix)}
        key = (msgspec.json.encode(layer.subs), msgspec.json.encode(next_norm), tuple(sorted(present.items())))
        known = self._by_key.get(key)
        writer = LayerWriter(self.context)
        outputs = write_layer(writer, layer, next_norm, next_path)
        if known is None:
            known = self._by_key[key] = f"layer{len(self._by_key)}"
            self.bodies[known] = writer.finish(known, outputs)
        return Call(body=known, layer=layer.index, weights=writer.bound, states=writer.states)

    def _head(self) -> Call:
        head = self.spec.head
        writer = LayerWriter(self.context)
        h = writer.stream("h", self.spec.hidden)
        rows = writer.choose(h, 0, writer.step("logit_rows"), "rows")
        rows = writer.affine(rows, scale=head.in_scale, label="head_in")
        if self.spec.embed.width:
            rows = writer.linear(rows, "head.project", "head_project")
        weight = writer.weight("embed.weight" if head.tied else "head.weight", "head_weight")
        logits = writer.op("linear", rows, weight, writer.optional("head.bias", "head_bias"), label="head")
        logits = writer.affine(logits, scale=head.scale, softcap=head.softcap, label="head_out")
        self.bodies["head"] = writer.finish("head", {"logits": logits})
        return Call(body="head", layer=None, weights=writer.bound)
