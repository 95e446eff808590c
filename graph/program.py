"""What a program takes and gives at each step. The metadata of a step is an explicit tuple, never a context object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from treadle.graph.buckets import Buckets
from treadle.graph.ir import Call, Graph, Role, role
from treadle.graph.state import Slot, State
from treadle.graph.weights import WeightExpr


class StepInputs(NamedTuple):
    """One flat ragged batch: T new tokens of B sequences, decode tokens and prefill chunks alike.

    Shapes: T tokens, B sequences, M pages a sequence at most, R rows whose logits are wanted.
    A token at position -1 is padding or belongs to a stopped sequence: it writes no state.
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, index of the token in its sequence, or -1"""
    seq_ids: Tensor
    """[T] int32, row of the page table"""
    q_starts: Tensor
    """[B + 1] int32, where each sequence's tokens start in the flat batch; sequences are contiguous and in order"""
    kv_lens: Tensor
    """[B] int32, tokens of the sequence that attention may see, this step's included; 0 = stopped, skip"""
    page_tables: Tensor
    """[G, B, M] int32, for each group of states: page offsets in 256-byte units from the arena's start, in sequence
    order; entries of pages that no query sees any more mean nothing"""
    blocks: Tensor
    """[B] int32, where each sequence's block of fixed-size states begins, in the same units"""
    logit_rows: Tensor
    """[R] int64, which of the T rows get logits"""


Memory = Tensor | Mapping[Slot, Tensor]
"""The arena, or the states of each slot apart."""


class _Bound(NamedTuple):
    """A call: its function, the arguments that stay, where values go in, and where results go."""

    function: Callable[..., Sequence[Tensor]]
    arguments: list[Tensor | None]
    fills: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]


class Executable:
    """A graph bound to its weights and to the memory of its state: a list of calls, nothing left to look up.

    ``memory`` is the arena (uint8, one tensor) or, at MODEL level, a tensor for each slot of the state: a dense history
    [B, L, K, Dk + Dv], or the bytes of a part of the block [B, nbytes].
    """

    def __init__(self, graph: Graph, weights: Mapping[WeightExpr, Tensor], memory: Memory) -> None:
        self._functions = {name: body.function() for name, body in graph.bodies.items()}
        num_fields, self.num_groups = len(StepInputs._fields), len(graph.state.groups)
        indices = {name: i for i, name in enumerate(StepInputs._fields)}
        indices |= {f"page_table {group}": num_fields + group for group in range(self.num_groups)}
        num_given = len(indices)
        self._calls: list[_Bound] = []
        for call in graph.calls:
            body = graph.bodies[call.body]
            bound: list[Tensor | None] = []
            fills: list[tuple[int, int]] = []
            for position, node in enumerate(body.placeholders):
                bound.append(self._bound(node, call, weights, memory))
                if role(node) in (Role.STREAM, Role.STEP):
                    name = f"page_table {call.group}" if node.name == "page_table" else node.name
                    fills.append((position, indices[name]))
            outputs = tuple(indices.setdefault(name, len(indices)) for name in body.outputs)
            self._calls.append(_Bound(self._functions[call.body], bound, tuple(fills), outputs))
        self._num_streams = len(indices) - num_given
        self._names = indices

    @staticmethod
    def _bound(node: Node, call: Call, weights: Mapping[WeightExpr, Tensor], memory: Memory) -> Tensor | None:
        """Return the tensor that a placeholder has in every step, None if it changes with the step."""
        match role(node):
            case Role.WEIGHT:
                return weights[call.weights[node.name]]
            case Role.ARENA:
                assert isinstance(memory, Tensor)
                return memory
            case Role.STATE:
                assert not isinstance(memory, Tensor)
                return memory[call.states[node.name]]
            case _:
                return None

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits [R, V] of the wanted rows; the state has grown by the step's tokens."""
        return self.trunk(inputs)(inputs.logit_rows)

    @torch.no_grad()
    def trunk(self, inputs: StepInputs) -> Callable[[Tensor], Tensor]:
        """Do all but the head; return what gives the logits of any of the T rows, as often as it is called."""
        values: list[Tensor] = [*inputs, *inputs.page_tables.unbind(0), *inputs[:1] * self._num_streams]
        for call in self._calls[:-1]:
            self._run(call, values)
        return partial(self._head, values)

    @torch.no_grad()
    def _head(self, values: list[Tensor], rows: Tensor) -> Tensor:
        values = values[:]
        values[StepInputs._fields.index("logit_rows")] = rows
        self._run(self._calls[-1], values)
        return values[self._names["logits"]]

    @staticmethod
    def _run(call: _Bound, values: list[Tensor]) -> None:
        function, bound, fills, outputs = call
        arguments = bound[:]
        for position, index in fills:
            arguments[position] = values[index]
        for index, result in zip(outputs, function(*arguments)):
            values[index] = result


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """One way in which the model runs."""

    graph: Graph
    max_tokens: int | None = None
    """tokens of the largest step that it serves; None: any number"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a model runs on one rank, before it is bound to weights and memory. All lowerings share both."""

    lowerings: tuple[Lowering, ...]
    """those for small steps first; the last one serves any step"""
    buckets: Buckets = field(default_factory=Buckets)
    """the shapes of steps that are captured"""

    def __post_init__(self) -> None:
        assert self.lowerings, "a program has a lowering"
        assert self.lowerings[-1].max_tokens is None, "the last lowering serves any step"

    @property
    def state(self) -> State:
        """What layers keep between steps."""
        return self.lowerings[-1].graph.state

    @property
    def weights(self) -> tuple[WeightExpr, ...]:
        """Every weight expression of any lowering, each once."""
        return tuple(dict.fromkeys(expr for lowering in self.lowerings for expr in lowering.graph.weights))


class Executables:
    """A program bound to its weights and to the memory of its state."""

    def __init__(self, program: Program, weights: Mapping[WeightExpr, Tensor], memory: Tensor) -> None:
        self._choices = [
            (lowering.max_tokens, Executable(lowering.graph, weights, memory)) for lowering in program.lowerings
        ]

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits [R, V] of the wanted rows, by the first lowering that serves a step of this size."""
        return self._choose(inputs).forward(inputs)

    def trunk(self, inputs: StepInputs) -> Callable[[Tensor], Tensor]:
        """Do all but the head, by the same; return what gives the logits of any rows."""
        return self._choose(inputs).trunk(inputs)

    def _choose(self, inputs: StepInputs) -> Executable:
        num_tokens = inputs.token_ids.shape[0]
        return next(executable for limit, executable in self._choices if limit is None or num_tokens <= limit)
