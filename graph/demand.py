"""How many items of every kind of state sequences need, and what that makes of an arena. No torch here.

Kinds are counted in one order everywhere: the groups of pages, then the block if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graph.slabs import Slabs, cut_arena, least_bytes
from treadle.graph.state import UNIT_BYTES, State

BLOCK_NAME = "block"
"""of the kind of blocks; a kind of pages has the name of its group"""


@dataclass(frozen=True)
class KindPlan:
    """What a plan sets aside for one kind of state; kinds lend each other what they do not use."""

    name: str
    item_bytes: int
    planned_bytes: int


@dataclass(frozen=True)
class Demand:
    """What sequences keep of ``state`` when steps take up to ``step_tokens`` tokens."""

    state: State
    step_tokens: int
    checkpoints: bool = True
    """whether sequences leave something from which others go on"""

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every kind."""
        groups = tuple(group.name for group in self.state.groups)
        return groups if self.state.block is None else (*groups, BLOCK_NAME)

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """The size of an item of every kind."""
        pages = tuple(group.page_bytes for group in self.state.groups)
        return pages if self.state.block is None else (*pages, self.state.block.block_bytes)

    def sequence(self, num_tokens: int, step_tokens: int | None = None) -> list[int]:
        """Return the most items of every kind that a sequence has until it has ``num_tokens``.

        ``step_tokens``: of the largest step that advances it; not given: of a prompt.
        """
        step = self.step_tokens if step_tokens is None else step_tokens
        pages = [group.most_pages(num_tokens, step) for group in self.state.groups]
        return pages if self.state.block is None else [*pages, 1]

    def checkpoint(self, num_tokens: int) -> list[int]:
        """Return the items of every kind from which another sequence goes on behind ``num_tokens`` tokens.

        Pages of the first group are left out: they are what the prefix tree holds anyway.
        """
        if not (self.state.needs_checkpoints and self.checkpoints):
            return [0] * len(self.names)
        _, *others = self.sequence(num_tokens, step_tokens=1)
        return [0, *others]

    def running(self, num_seqs: int, num_tokens: int) -> list[int]:
        """Return the items of ``num_seqs`` sequences of ``num_tokens`` each: one reads its prompt, the rest answer."""
        prompt, answer = self.sequence(num_tokens), self.sequence(num_tokens, step_tokens=1)
        return [one + (num_seqs - 1) * other for one, other in zip(prompt, answer)]

    def least(self, num_seqs: int, num_tokens: int) -> list[int]:
        """Return the items without which nothing runs.

        A sequence of ``num_tokens`` and one more page of what it appends, what a checkpoint takes, and for every one of
        ``num_seqs`` sequences that are to run together a page.
        """
        one, kept = self.sequence(num_tokens), self.checkpoint(num_tokens)
        full, *others = [item + other for item, other in zip(one, kept)]
        return [max(full + 1, num_seqs), *others]

    def cut(self, arena_bytes: int) -> Slabs:
        """Return how an arena is cut into slabs."""
        return cut_arena(self.item_bytes, arena_bytes, self.state.scratch_bytes)

    def fits(self, counts: list[int], arena_bytes: int) -> bool:
        """Return whether an arena holds so many items of every kind at once."""
        return arena_bytes >= self.state.scratch_bytes and self.cut(arena_bytes).holds(counts)

    def arena_bytes(self, counts: list[int]) -> int:
        """Return the bytes of an arena that holds so many items of every kind at once, and a scratch item."""
        return least_bytes(self.item_bytes, counts, self.state.scratch_bytes)

    def usable(self, num_bytes: int) -> int:
        """Return how many of ``num_bytes`` an arena can make use of: whole pages where there is nothing else."""
        step = self.item_bytes[0] if len(self.item_bytes) == 1 else UNIT_BYTES
        return num_bytes // step * step
