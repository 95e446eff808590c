"""Steps over sequences that keep a part of a block: cut anywhere, with stopped sequences and padding between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UNIT = 256
Tail = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Call = Callable[..., Tensor]
"""Takes the tensors of the step's rows and the tail of inputs about state; returns the op's result."""
CUTS: tuple[tuple[int, int, int], ...] = ((1, 40, 0), (0, 90, 3), (2, 0, 1), (5, 1, 1), (1, 0, 70))
"""Tokens of three sequences in each of five steps."""
LENGTHS = [sum(step[sequence] for step in CUTS) for sequence in range(3)]


class Memory:
    """The part under test of every sequence's block, NaN wherever nothing has been written.

    ``flat``: in an arena, behind another part, blocks in no order; else one row a sequence.
    """

    def __init__(self, sequences: int, shape: Sequence[int], dtype: torch.dtype, *, flat: bool) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.units = -(-self.nbytes // UNIT)
        self.shape, self.dtype, self.flat = tuple(shape), dtype, flat
        order = list(range(sequences))[::-1]
        # a unit in front of each part, and one behind, that belong to others
        self.blocks = torch.tensor([1 + place * (self.units + 2) for place in order], dtype=torch.int32)
        self.offset = torch.tensor([UNIT])
        size = (1 + sequences * (self.units + 2)) * UNIT + 7
        self.memory = torch.full((size,) if flat else (sequences, self.nbytes), 0xFF, dtype=torch.uint8)

    def tail(self, q_starts: Tensor, positions: Tensor, kv_lens: Tensor) -> Tail:
        return self.memory, self.blocks, self.offset, q_starts, positions, kv_lens

    def state(self, sequence: int) -> Tensor:
        """What one sequence's part holds."""
        if not self.flat:
            return self.memory[sequence].view(self.dtype).view(self.shape)
        start = int(self.blocks[sequence]) * UNIT + int(self.offset)
        return self.memory[start : start + self.nbytes].clone().view(self.dtype).view(self.shape)

    def others_untouched(self) -> bool:
        if not self.flat:
            return True
        rest = torch.ones(self.memory.numel(), dtype=torch.bool)
        for block in self.blocks.tolist():
            start = (block + 1) * UNIT
            rest[start : start + self.units * UNIT] = False
        return bool((self.memory[rest] == 0xFF).all())


def step(
    call: Call, memory: Memory, tokens: Sequence[Sequence[Tensor]], starts: Sequence[int], counts: Sequence[int]
) -> list[Tensor]:
    """Run ``counts[s]`` tokens of each sequence s from ``starts[s]`` on; return the results of each.

    A sequence without tokens has one row of NaN at position -1, and two more such rows end the step.
    """
    rows: list[list[Tensor]] = []
    positions: list[int] = []
    q_starts = [0]
    for own, start, count in zip(tokens, starts, counts):
        dead = [torch.full_like(t[:1], torch.nan) for t in own]
        rows.append([t[start : start + count] for t in own] if count else dead)
        positions += range(start, start + count) if count else [-1]
        q_starts.append(len(positions))
    rows.append([torch.full_like(t[:1], torch.nan).repeat_interleave(2, 0) for t in tokens[0]])
    lens = [start + count if count else 0 for start, count in zip(starts, counts)]
    out = call(
        *(torch.cat(parts) for parts in zip(*rows)),
        memory.tail(
            torch.tensor(q_starts, dtype=torch.int32),
            torch.tensor([*positions, -1, -1]),
            torch.tensor(lens, dtype=torch.int32),
        ),
    )
    return [out[first : first + count] for first, count in zip(q_starts, counts)]


def in_steps(call: Call, memory: Memory, tokens: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Run all tokens of the sequences, cut as CUTS says; return the results of each sequence."""
    results: list[list[Tensor]] = [[] for _ in tokens]
    starts = [0] * len(tokens)
    for counts in CUTS:
        for made, result in zip(step(call, memory, tokens, starts, counts), results):
            result.append(made)
        starts = [start + count for start, count in zip(starts, counts)]
    assert memory.others_untouched()
    return [torch.cat(result) for result in results]
