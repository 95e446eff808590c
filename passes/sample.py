"""Inputs on which two graphs can be compared: a ragged step over histories that exist already, at random pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treadle.graph.ir import Graph, Level
from treadle.graph.program import Memory, StepInputs
from treadle.graph.state import BLOCK, UNIT_BYTES, BlockPart, PagedKV, Slot, State

LENGTHS = ((0, 7), (9, 1), (0, 1), (5, 4), (21, 1))
"""(tokens in the history, new tokens) of each sequence: prefill, decode, the shortest, a chunk, a long decode."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step: its inputs, and what every layer remembers before it, each state apart and all in an arena."""

    inputs: StepInputs
    states: Mapping[Slot, Tensor]
    arena: Tensor

    def memory(self, graph: Graph) -> Memory:
        """Return a private copy of the state in the form that the graph's level takes."""
        if graph.level is Level.MODEL:
            return {slot: state.clone() for slot, state in self.states.items()}
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
    pages = state.full.pages_for(max(old + new for old, new in LENGTHS))
    tables, blocks, arena_bytes = _lay_out(state, pages, generator)
    inputs = StepInputs(
        token_ids=torch.randint(vocab, (len(positions),), generator=generator),
        positions=torch.tensor(positions),
        seq_ids=torch.tensor(rows, dtype=torch.int32),
        q_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([old + new for old, new in LENGTHS], dtype=torch.int32),
        page_tables=tables,
        blocks=blocks,
        logit_rows=torch.tensor(starts[1:]) - 1,
    )
    arena = torch.zeros(arena_bytes, dtype=torch.uint8)
    states: dict[Slot, Tensor] = {}
    for number, group in enumerate(state.groups):
        for index, layer in enumerate(group.layers):
            shape = (len(LENGTHS), pages * group.page_tokens, layer.kv_heads, layer.k_dim + layer.v_dim)
            history = torch.randn(shape, generator=generator).to(graph.dtype)
            states[Slot(number, index)] = history
            _store_history(group, index, history, tables[number], arena)
    for index, part in enumerate(state.block.parts if state.block is not None else ()):
        states[Slot(BLOCK, index)] = _store_part(state, index, part, blocks, arena, generator)
    return Sample(inputs=inputs, states=states, arena=arena)


def _lay_out(state: State, pages: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Return page tables [G, B, M] and blocks [B] at random places without overlap, and the bytes that hold all."""
    rows, groups = len(LENGTHS), len(state.groups)
    sizes = [group.page_units for group in state.groups for _ in range(rows * pages)]
    sizes += [state.block.block_units] * rows if state.block is not None else []
    places = torch.zeros(len(sizes), dtype=torch.int32)
    at = state.scratch_bytes // UNIT_BYTES
    for item in torch.randperm(len(sizes), generator=generator).tolist():
        places[item] = at
        at += sizes[item]
    tables = places[: groups * rows * pages].view(groups, rows, pages)
    blocks = places[groups * rows * pages :] if state.block is not None else torch.zeros(rows, dtype=torch.int32)
    return tables, blocks, at * UNIT_BYTES


def _store_history(group: PagedKV, index: int, history: Tensor, page_table: Tensor, arena: Tensor) -> None:
    """Copy a dense history [B, L, K, Dk + Dv] into the pages of its sequences."""
    layer, size = group.layers[index], group.page_tokens
    for row, handles in enumerate(page_table.tolist()):
        for page, handle in enumerate(handles):
            tokens = history[row, page * size : (page + 1) * size]
            k, v = tokens[..., : layer.k_dim], tokens[..., layer.k_dim :]
            content = torch.cat([k.transpose(0, 1).flatten(), v.transpose(0, 1).flatten()]).view(torch.uint8)
            start = handle * UNIT_BYTES + group.layer_offset(index)
            arena[start : start + content.numel()] = content


def _store_part(
    state: State, index: int, part: BlockPart, blocks: Tensor, arena: Tensor, generator: torch.Generator
) -> Tensor:
    """Return random content of a part for every sequence, [B, nbytes]; the arena holds it too."""
    shape = (len(LENGTHS), math.prod(part.shape))
    content = torch.zeros(len(LENGTHS), part.nbytes, dtype=torch.uint8)
    values = torch.randn(shape, generator=generator).to(getattr(torch, part.dtype)).view(torch.uint8)
    content[:, : values.shape[1]] = values
    for row, block in enumerate(blocks.tolist()):
        start = block * UNIT_BYTES + state.offset(Slot(BLOCK, index))
        arena[start : start + part.nbytes] = content[row]
    return content
