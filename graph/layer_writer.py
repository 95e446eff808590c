"""What the bodies of one model share while they are written, and the writer that binds canonical weights to inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from treadle.graph.body import BodyWriter
from treadle.graph.ir import Role, Shapes
from treadle.graph.spec import ModelSpec, Norm, RopeTable, SpecError
from treadle.graph.state import LayerKV
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


class ModelContext:
    """The model whose bodies are written, and the state that its layers have asked for so far."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, TensorLike], options: BuildOptions) -> None:
        self.spec, self.tensors, self.options = spec, tensors, options
        self.shapes = Shapes()
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.kv_layers: list[LayerKV] = []

    def add_kv(self, layer: LayerKV) -> int:
        """Return the slot of a new layer of the paged KV state."""
        self.kv_layers.append(layer)
        return len(self.kv_layers) - 1


class LayerWriter(BodyWriter):
    """A body writer that binds canonical weights to inputs as they are first used."""

    def __init__(self, model: ModelContext) -> None:
        super().__init__(model.shapes)
        self.model = model
        self.bound: dict[str, WeightExpr] = {}
        self.slot: int | None = None

    def stream(self, name: str, width: int) -> Node:
        """Return the input that carries ``name`` from the call before, [T, width]."""
        return self.input(name, Role.STREAM, ("T", width), self.model.dtype)

    def weight(self, canonical: str, name: str) -> Node:
        """Return the input bound to a canonical weight, in the model's dtype."""
        return self.bind(name, self.leaf(canonical))

    def float32(self, canonical: str, name: str) -> Node:
        """Return the input bound to a canonical weight in float32, whatever the model's dtype."""
        return self.bind(name, self.leaf(canonical, "float32"))

    def leaf(self, canonical: str, dtype: str = "") -> Leaf:
        """Return a canonical weight as an expression, in the model's dtype unless another is given."""
        tensor = self.model.tensors.get(canonical)
        if tensor is None:
            raise SpecError(f"the checkpoint has no {canonical}")
        return Leaf(canonical, tuple(tensor.shape), dtype or self.model.options.dtype)

    def optional(self, canonical: str, name: str) -> Node | None:
        """Return the same, or None where the checkpoint has no such tensor."""
        return self.weight(canonical, name) if canonical in self.model.tensors else None

    def bind(self, name: str, expr: WeightExpr) -> Node:
        """Return the input ``name``, bound to ``expr`` in this call."""
        assert self.bound.setdefault(name, expr) == expr, f"two weights called {name}"
        return self.input(name, Role.WEIGHT, expr.shape, getattr(torch, expr.dtype))

    def rope_rows(self, table: RopeTable) -> Node:
        """Return the angles of every position that the deployment serves."""
        options = self.model.options
        return self.bind("rope_table", RopeRows(table, options.max_len, options.dtype if table.rounded else "float32"))

    def norm(self, norm: Norm | None, x: Node, path: str, name: str) -> Node:
        """Append a norm over the last dim; None leaves x as it is."""
        if norm is None:
            return x
        refuse(path, {"gate_act": norm.gate_act, "low_rank_gate": norm.low_rank_gate})
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


def refuse(path: str, fields: Mapping[str, Any]) -> None:
    """Raise for a field that asks for a primitive which has no op yet."""
    for name, value in fields.items():
        if value:
            raise SpecError(f"{path}: {name} = {value!r} has no kernels yet")
