"""What one step does, as the scheduler says it and the packet carries it. Host only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle.runtime.sequence import Sequence

TableRun = Rows[Rows[int]]
"""Offsets of pages in units of 256 bytes: equally many of each group of states, 0 where a group has none there."""


class ByteCopy(NamedTuple):
    """A copy inside the arena."""

    source: int
    """in units of 256 bytes"""
    target: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Known tokens [start, start + count) of a sequence, computed in one step; the last chunk samples a token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    forks: tuple[Sequence, ...] = ()
    """sequences of its group that begin to decode with it: the same prompt, a token of their own"""

    @property
    def scored(self) -> range:
        """Positions whose logits are wanted for the log-probability of the prompt's next token."""
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        return range(max(self.start, sequence.prompt_from), min(self.start + self.count, sequence.prompt_len - 1))


@dataclass
class Plan:
    """What one step does. Rows stand in this order: decodes, then chunks."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """sequences that got a slot since the last step"""
    tables: list[tuple[int, int, TableRun]] = field(default_factory=list)
    """new entries of page tables: which row of the step, the index of the first, and so many of each group"""
    fork_tables: list[TableRun] = field(default_factory=list)
    """the pages of each of ``forks``, from the first on"""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """slots whose block has moved, and where it begins now, in units of 256 bytes"""
    before: list[ByteCopy] = field(default_factory=list)
    """what is copied inside the arena before the program runs"""
    after: list[ByteCopy] = field(default_factory=list)
    """and once the step's tokens are in it"""

    @property
    def num_tokens(self) -> int:
        """Tokens fed to the program."""
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """One for each row of the page table."""
        return self.decodes + [chunk.sequence for chunk in self.chunks]

    @property
    def sampled(self) -> list[Sequence]:
        """One for each row of logits: decodes, last chunks, forks."""
        last = [chunk.sequence for chunk in self.chunks if chunk.samples]
        return self.decodes + last + self.forks

    @property
    def forks(self) -> list[Sequence]:
        """Sequences that sample from the logits of another one's chunk."""
        return [fork for chunk in self.chunks for fork in chunk.forks]
