"""What the bodies of one model share while they are written, and the writer that binds canonical weights to inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from treadle.graph.body import BodyWriter
from treadle.graph.ir import Role, Shapes
from treadle.graph.layer_state import Kept, Shaped, Weights, kept_by
from treadle.graph.spec import Attention, ModelSpec, Norm, Op, RopeTable, SpecError
from treadle.graph.state import Slot, StateBuilder
from treadle.graph.weights import Ints, Leaf, RopeRows, WeightExpr

TensorLike = Shaped


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
        self.states = StateBuilder(options.dtype, options.page_tokens)
        self.kv_of_layer: dict[int, tuple[Attention, Slot]] = {}
        """the attention, and its keys and values, of each layer that has its own"""


class LayerWriter(BodyWriter):
    """A body writer that binds canonical weights to inputs as they are first used."""

    def __init__(self, model: ModelContext) -> None:
        super().__init__(model.shapes)
        self.model = model
        self.bound: dict[str, WeightExpr] = {}
        self.states: dict[str, Slot] = {}
        self.passed_on: dict[str, Node] = {}
        """what later layers read beside the residual stream, by its name among the streams"""

    def stream(self, name: str, *dims: int) -> Node:
        """Return the input that carries ``name`` from an earlier call, [T, *dims]."""
        return self.input(name, Role.STREAM, ("T", *dims), self.model.dtype)

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

    def keep(self, op: Op, path: str) -> list[Node]:
        """Return an input for each state that ``op`` keeps, appended ones first (``graph.layer_state``).

        Shapes: a dense history [B, L, K, Dk + Dv]; the bytes of a part of the block, [B, nbytes].
        """
        return self.keep_states(kept_by(op, Weights(path, self.model.tensors, self.model.options.dtype)), path)

    def keep_states(self, kept: Kept, path: str) -> list[Node]:
        """Return an input for each of the given states."""
        slots = kept.place(self.model.states)
        assert not slots.keys() & self.states.keys(), f"{path}: two states of one name in one body"
        self.states |= slots
        found = []
        for name, layer in kept.appended.items():
            shape = ("B", "L", layer.kv_heads, layer.k_dim + layer.v_dim)
            found.append(self.input(name, Role.STATE, shape, self.model.dtype))
        for name, part in kept.parts.items():
            found.append(self.input(name, Role.STATE, ("B", part.nbytes), torch.uint8))
        return found

    def state_tail(self, memory: Node) -> list[Node]:
        """Return the arguments with which an op reads and writes a part of its sequences' blocks."""
        offset = self.bind(offset_name(memory.name), Ints((0,)))
        fields = [self.step(name) for name in ("q_starts", "positions", "kv_lens")]
        return [memory, self.step("blocks"), offset, *fields]

    def added_conv(self, x: Node, memory: Node, path: str, name: str) -> Node:
        """Append x + conv(x), with the causal convolution whose weight is ``path``.weight [C, K]."""
        weight = self.weight(f"{path}.weight", f"{name}_weight")
        y = self.op("conv1d", x, weight, None, *self.state_tail(memory), "none", label=name)
        return self.op("add", x, y, label=f"{name}_added")

    def norm(self, norm: Norm | None, x: Node, path: str, name: str) -> Node:
        """Append a norm over the last dim; None leaves x as it is."""
        if norm is None:
            return x
        refuse(path, {"gate_act": norm.gate_act})
        weight = self.optional(f"{path}.weight", f"{name}_weight")
        bias = self.optional(f"{path}.bias", f"{name}_bias")
        y = self.op("norm", x, weight, bias, norm.kind, norm.eps, norm.plus_one, norm.groups, norm.cast, label=name)
        if not norm.low_rank_gate:
            return y
        gate = self.linear(y, f"{path}.gate_down", f"{name}_gate_down")
        gate = self.op("activation", gate, "silu", label=f"{name}_gate_act")
        gate = self.linear(gate, f"{path}.gate_up", f"{name}_gate_up")
        return self.op("act_mul", gate, y, "sigmoid", label=f"{name}_gated")

    def linear(self, x: Node, path: str, name: str) -> Node:
        """Append x W^T + b."""
        weight, bias = self.weight(f"{path}.weight", f"{name}_weight"), self.optional(f"{path}.bias", f"{name}_bias")
        return self.op("linear", x, weight, bias, label=name)

    def affine(self, x: Node, *, label: str, scale: float = 1.0, softcap: float = 0.0, clip: float = 0.0) -> Node:
        """Append a clip, a scale and a softcap; nothing where all are off."""
        if scale == 1.0 and not softcap and not clip:
            return x
        return self.op("affine", x, scale, softcap, clip, label=label)


def offset_name(state: str) -> str:
    """Return the name of the constant that says where a state lies inside its page or block."""
    return f"{state}_offset"


def refuse(path: str, fields: Mapping[str, Any]) -> None:
    """Raise for a field that asks for a primitive which has no op yet."""
    for name, value in fields.items():
        if value:
            raise SpecError(f"{path}: {name} = {value!r} has no kernels yet")
