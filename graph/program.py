"""What a program takes and gives at each step. The metadata of a step is an explicit tuple, never a context object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from treadle.graph.ir import Call, Graph, Role, role
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
    page_table: Tensor
    """[B, M] int32, page offsets in 256-byte units from the arena's start, in sequence order"""
    logit_rows: Tensor
    """[R] int64, which of the T rows get logits"""


class Executable:
    """A graph bound to its weights and to the memory of its state: a list of calls, nothing left to look up.

    ``memory`` is the arena (uint8, one tensor) or, at MODEL level, one dense history for each slot of the state.
    """

    def __init__(self, graph: Graph, weights: Mapping[WeightExpr, Tensor], memory: Tensor | Sequence[Tensor]) -> None:
        self._functions = {name: body.function() for name, body in graph.bodies.items()}
        indices = {name: i for i, name in enumerate(StepInputs._fields)}
        self._calls = []
        for call in graph.calls:
            body = graph.bodies[call.body]
            bound: list[Tensor | None] = []
            fills: list[tuple[int, int]] = []
            for position, node in enumerate(body.placeholders):
                bound.append(self._bound(node, call, weights, memory))
                if role(node) in (Role.STREAM, Role.STEP):
                    fills.append((position, indices[node.name]))
            outputs = tuple(indices.setdefault(name, len(indices)) for name in body.outputs)
            self._calls.append((self._functions[call.body], bound, tuple(fills), outputs))
        self._num_streams = len(indices) - len(StepInputs._fields)
        self._names = indices

    @staticmethod
    def _bound(
        node: Node, call: Call, weights: Mapping[WeightExpr, Tensor], memory: Tensor | Sequence[Tensor]
    ) -> Tensor | None:
        """Return the tensor that a placeholder has in every step, None if it changes with the step."""
        match role(node):
            case Role.WEIGHT:
                return weights[call.weights[node.name]]
            case Role.ARENA:
                assert isinstance(memory, Tensor)
                return memory
            case Role.STATE:
                assert call.state_slot is not None
                return memory[call.state_slot]
            case _:
                return None

    @torch.no_grad()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits [R, V] of the wanted rows; the state has grown by the step's tokens."""
        values: list[Tensor] = [*inputs, *inputs[:1] * self._num_streams]
        for function, bound, fills, outputs in self._calls:
            arguments = bound[:]
            for position, index in fills:
                arguments[position] = values[index]
            for index, result in zip(outputs, function(*arguments)):
                values[index] = result
        return values[self._names["logits"]]
