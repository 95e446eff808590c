"""The structured graph: distinct layer bodies, and a table of calls that binds them to weights and state.

A body is a torch.fx graph of semantic ops. Every placeholder has a role (what binds it) and every node that yields a
tensor carries ``meta["val"]``, a fake tensor over the symbols T, B, M, R, L below. A body is never changed in place:
passes copy it (``passes.base.BodyEditor``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from treadle.graph.state import BLOCK, Slot, State
from treadle.graph.weights import WeightExpr


class Level(Enum):
    """How far a graph has been lowered; ``graph.verify`` holds what each level promises."""

    MODEL = "model"
    """one device, semantic ops, dense histories as state"""
    SHARDED = "sharded"
    """one rank, its state in its arena, collectives explicit"""
    LOWERED = "lowered"
    """every op is a kernel of the target"""


class Role(Enum):
    """What binds a placeholder of a body."""

    STREAM = "stream"
    """an output of an earlier call, by name"""
    STEP = "step"
    """a field of StepInputs, by name"""
    WEIGHT = "weight"
    """the call's own weight expression"""
    STATE = "state"
    """a state of the call's layer, by name (MODEL level): a dense history, or the bytes of a part of the block"""
    ARENA = "arena"
    """the rank's arena, one byte tensor"""


SYMBOLS = {"T": 11, "B": 5, "B1": 6, "M": 7, "R": 3, "L": 23, "A": 4096 * 13}
"""Dynamic sizes and the odd hint that stands for each while shapes are worked out: tokens, sequences, sequences + 1,
pages of a table row, logit rows, dense history length, arena bytes."""


class Shapes:
    """Makes the fake tensors of one graph, so that the same symbol means the same size everywhere in it."""

    def __init__(self) -> None:
        self._env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self._env)
        self._symbols: dict[str, torch.SymInt] = {}

    def size(self, name: str) -> torch.SymInt:
        """Return the symbolic size called ``name`` in SYMBOLS."""
        if name not in self._symbols:
            source = ConstantSource(name)
            symbol = self._env.create_symbol(SYMBOLS[name], source, dynamic_dim=DimDynamic.DYNAMIC)
            made = self._env.create_symintnode(symbol, hint=SYMBOLS[name], source=source)
            assert isinstance(made, torch.SymInt)
            self._symbols[name] = made
        return self._symbols[name]

    def tensor(self, shape: Sequence[int | str], dtype: torch.dtype) -> torch.Tensor:
        """Return a fake tensor; strings in ``shape`` are symbols."""
        with self.mode:
            return torch.empty([self.size(dim) if isinstance(dim, str) else dim for dim in shape], dtype=dtype)

    def describe(self, value: torch.Tensor) -> str:
        """Return the type of a fake tensor as text, e.g. ``bfloat16[T, 576]``."""
        names = {str(size): name for name, size in self._symbols.items()}
        text = ", ".join(str(dim) for dim in value.shape)
        for symbol, name in sorted(names.items(), key=lambda item: -len(item[0])):
            text = text.replace(symbol, name)
        return f"{str(value.dtype).removeprefix('torch.')}[{text}]"


@dataclass(frozen=True, kw_only=True)
class Body:
    """What one kind of layer computes. Placeholders in the order streams, step fields, arena or state, weights."""

    name: str
    graph: torch.fx.Graph
    outputs: tuple[str, ...]
    """names under which later calls read the results, in the order the graph returns them"""
    compiled: Callable[..., Sequence[torch.Tensor]] | None = field(default=None, compare=False, repr=False)
    """takes the placeholders in order; None: the graph runs op by op"""

    @property
    def placeholders(self) -> tuple[torch.fx.Node, ...]:
        """The inputs, in call order."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    @property
    def ops(self) -> tuple[torch.fx.Node, ...]:
        """The nodes that compute something."""
        return tuple(node for node in self.graph.nodes if node.op == "call_function")

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """Return what runs the body: the compiled one if there is one, else the graph as Python code."""
        return self.compiled or torch.fx.GraphModule(torch.nn.Module(), self.graph).forward


def role(node: torch.fx.Node) -> Role:
    """Return what binds a placeholder."""
    found = node.meta["role"]
    assert isinstance(found, Role)
    return found


@dataclass(frozen=True, kw_only=True)
class Call:
    """One row of the layer table: a body with its own weights and state."""

    body: str
    layer: int | None
    """index of the model's layer, None for embedding and head"""
    weights: Mapping[str, WeightExpr]
    states: Mapping[str, Slot] = field(default_factory=dict)
    """what the call reads and changes between steps, by the name its body has for it"""

    @property
    def group(self) -> int:
        """The group whose page table the call's body reads; the first where it reads none."""
        groups = {slot.group for slot in self.states.values() if slot.group != BLOCK}
        assert len(groups) <= 1, f"layer {self.layer} has states in several groups"
        return next(iter(groups), 0)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The whole model at one level: run the calls in order, the last one's output is the logits."""

    level: Level
    bodies: Mapping[str, Body]
    calls: tuple[Call, ...]
    state: State
    dtype: torch.dtype
    shapes: Shapes = field(compare=False, repr=False)

    def replace_bodies(self, bodies: Mapping[str, Body], calls: tuple[Call, ...], level: Level | None = None) -> Graph:
        """Return the graph with other bodies and calls, at ``level`` if given."""
        return replace(self, bodies=bodies, calls=calls, level=level or self.level)

    @property
    def weights(self) -> tuple[WeightExpr, ...]:
        """Every weight expression bound anywhere, each once, in first use order."""
        return tuple(dict.fromkeys(expr for call in self.calls for expr in call.weights.values()))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all bound weights, each counted once."""
        return sum(expr.nbytes for expr in self.weights)

    @property
    def num_nodes(self) -> int:
        """Nodes that compute, over the distinct bodies."""
        return sum(len(body.ops) for body in self.bodies.values())
