"""Inputs on which two graphs can be compared: a ragged step over histories that exist already, at random pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treadle.graph.ir import Graph, Level
from treadle.graph.program import StepInputs
from treadle.graph.state import UNIT_BYTES, LayerKV, PagedKV

LENGTHS = ((0, 7), (9, 1), (0, 1), (5, 4), (21, 1))
"""(tokens in the history, new tokens) of each sequence: prefill, decode, the shortest, a chunk, a long decode."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step: its inputs, and what every layer remembers before it, both dense and as pages of an arena."""

    inputs: StepInputs
    histories: tuple[Tensor, ...]
    arena: Tensor

    def memory(self, graph: Graph) -> Tensor | tuple[Tensor, ...]:
        """Return a private copy of the state in the form that the graph's level takes."""
        if graph.level is Level.MODEL:
            return tuple(history.clone() for history in self.histories)
        return self.arena.clone()


def distinct_calls(graph: Graph) -> Graph:
    """Return the graph with each body called once: a small model in which every kind of layer computes."""
    first = {call.body: index for index, call in reversed(list(enumerate(graph.calls)))}
    return replace(graph, calls=tuple(graph.calls[index] for index in sorted(first.values())))


def draw(graph: Graph, vocab: int, seed: int = 0) -> Sample:
    """Return a random step for ``graph`` (any level), the same for the same seed."""
    state = graph.state
    generator = torch.Generator().manual_seed(seed)
    starts = [0]
    positions: list[int] = []
    rows: list[int] = []
    for row, (old, new) in enumerate(LENGTHS):
        positions += range(old, old + new)
        rows += [row] * new
        starts.append(len(positions))
    longest = max(old + new for old, new in LENGTHS)
    pages = state.pages_for(longest)
    handles = (torch.randperm(len(LENGTHS) * pages, generator=generator) + 1) * state.page_units
    inputs = StepInputs(
        token_ids=torch.randint(vocab, (len(positions),), generator=generator),
        positions=torch.tensor(positions),
        seq_ids=torch.tensor(rows, dtype=torch.int32),
        q_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([old + new for old, new in LENGTHS], dtype=torch.int32),
        page_table=handles.view(len(LENGTHS), pages).to(torch.int32),
        logit_rows=torch.tensor(starts[1:]) - 1,
    )

    def random_history(layer: LayerKV) -> Tensor:
        width = layer.k_dim + layer.v_dim
        shape = (len(LENGTHS), pages * state.page_tokens, layer.kv_heads, width)
        return torch.randn(shape, generator=generator).to(graph.dtype)

    histories = tuple(random_history(layer) for layer in state.layers)
    arena = torch.zeros((len(LENGTHS) * pages + 1) * state.page_bytes, dtype=torch.uint8)
    for slot, history in enumerate(histories):
        _store(state, slot, history, inputs.page_table, arena)
    return Sample(inputs=inputs, histories=histories, arena=arena)


def _store(state: PagedKV, slot: int, history: Tensor, page_table: Tensor, arena: Tensor) -> None:
    """Copy a dense history [B, L, K, Dk + Dv] into the pages of its sequences."""
    layer, size = state.layers[slot], state.page_tokens
    for row, handles in enumerate(page_table.tolist()):
        for index, handle in enumerate(handles):
            tokens = history[row, index * size : (index + 1) * size]
            k, v = tokens[..., : layer.k_dim], tokens[..., layer.k_dim :]
            content = torch.cat([k.transpose(0, 1).flatten(), v.transpose(0, 1).flatten()]).view(torch.uint8)
            start = handle * UNIT_BYTES + state.layer_offset(slot)
            arena[start : start + content.numel()] = content
