"""Blocks: the fixed-size state of sequences, read and written for the references of the ops that keep one.

A block's part is what one op of one layer keeps for one sequence. In ``memory`` of two dims, [B, bytes] uint8, row b
begins with sequence b's part; in an arena, [A] uint8, that part begins at byte blocks[b] * 256 + offset[0], a multiple
of 256, and takes whole units of 256 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treadle.graph.state import UNIT_BYTES


class Rows(NamedTuple):
    """The rows of a step that belong to one live sequence."""

    sequence: int
    rows: slice
    fresh: bool
    """the first of them is the sequence's first token: there is no state yet"""


class Part(NamedTuple):
    """One part of every sequence's block, and where the tokens of a step go."""

    memory: Tensor
    blocks: Tensor
    offset: Tensor
    q_starts: Tensor
    positions: Tensor
    kv_lens: Tensor

    def live(self) -> list[Rows]:
        """Return the sequences that have tokens in this step, in order. Copies three small tensors to the host."""
        starts, lengths, positions = (t.tolist() for t in (self.q_starts, self.kv_lens, self.positions))
        return [
            Rows(sequence, slice(start, end), positions[start] == 0)
            for sequence, (start, end, length) in enumerate(zip(starts, starts[1:], lengths))
            if length > 0 and start < end
        ]

    def read(self, sequences: Sequence[Rows], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a copy of the states of some sequences, [len(sequences), *shape]; zeros for those without one."""
        nbytes = math.prod(shape) * dtype.itemsize
        numbers = [item.sequence for item in sequences]
        if self.memory.ndim == 2:
            found = self.memory[numbers, :nbytes]
        else:
            found = self._units()[self._places(numbers, nbytes)].flatten(1)[:, :nbytes]
        states = found.contiguous().view(dtype).view(len(numbers), *shape)
        states[[item.fresh for item in sequences]] = 0
        return states

    def write(self, sequences: Sequence[Rows], states: Tensor) -> None:
        """Store the states of some sequences: [len(sequences), ...]."""
        content = states.contiguous().view(torch.uint8).reshape(len(sequences), -1)
        numbers, nbytes = [item.sequence for item in sequences], content.shape[1]
        if self.memory.ndim == 2:
            self.memory[numbers, :nbytes] = content
            return
        places = self._places(numbers, nbytes)
        padded = torch.nn.functional.pad(content, (0, places.shape[1] * UNIT_BYTES - nbytes))
        self._units()[places] = padded.view(*places.shape, UNIT_BYTES)

    def _units(self) -> Tensor:
        return self.memory[: self.memory.numel() // UNIT_BYTES * UNIT_BYTES].view(-1, UNIT_BYTES)

    def _places(self, numbers: list[int], nbytes: int) -> Tensor:
        """Return which units of the arena hold a part: [len(numbers), units]."""
        count = -(-nbytes // UNIT_BYTES)
        first = self.blocks[numbers].long() + self.offset // UNIT_BYTES
        return first.view(-1, 1) + torch.arange(count, device=first.device)
