"""What a step changes in tables and copies in the arena, collected by handle while it is planned.

Taking an item may move others, so that offsets are certain only when the whole step is planned.
"""

from __future__ import annotations

from treadle.graph.state import State
from treadle.runtime.plan import ByteCopy, Plan, TableRun
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.pool import Handle


class Changes:
    """Copies and new entries of tables of the step being planned."""

    def __init__(self, arena: Arena, state: State) -> None:
        self._arena = arena
        self._num_groups = len(state.groups)
        self._block = len(state.groups)
        self._before: list[tuple[int, Handle, Handle]] = []
        self._after: list[tuple[int, Handle, Handle]] = []
        # By sequence: which row of the step, and the first and the end of its new entries.
        self._touched: dict[Sequence, tuple[int, int, int]] = {}
        # Those whose tables are out of date since something was moved.
        self._stale: set[Sequence] = set()

    def copy_before(self, kind: int, source: Handle, target: Handle) -> None:
        """Copy an item before the step's program."""
        self._before.append((kind, source, target))

    def copy_after(self, kind: int, source: Handle, target: Handle) -> None:
        """Copy an item behind the step's program."""
        self._after.append((kind, source, target))

    def touch(self, sequence: Sequence, row: int, first: int, end: int) -> None:
        """Note that the entries [first, end) of a sequence in row ``row`` of the step are new."""
        known = self._touched.get(sequence)
        if known is not None:
            first, end = min(first, known[1]), max(end, known[2])
        self._touched[sequence] = (row, first, end)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was noted of a sequence that gives everything back."""
        self._touched.pop(sequence, None)
        self._stale.discard(sequence)

    def settle(self, plan: Plan, running: list[Sequence]) -> None:
        """Write everything into the plan, at the offsets that hold when its step runs."""
        if self._arena.moved:
            self._note_moves(plan, running)
        if self._stale:
            rows = {sequence: row for row, sequence in enumerate(plan.sequences)}
            for sequence in [each for each in self._stale if each in rows]:
                self._stale.remove(sequence)
                self.touch(sequence, rows[sequence], 0, len(sequence.pages))
        for sequence, (row, first, end) in self._touched.items():
            plan.tables.append((row, first, self._run(sequence, first, end)))
        self._touched.clear()
        plan.fork_tables += [self._run(fork, 0, len(fork.pages)) for fork in plan.forks]
        self._set_blocks(plan)
        plan.before += self.moves()
        plan.before += self._resolve(self._before)
        plan.after += self._resolve(self._after)

    def moves(self) -> list[ByteCopy]:
        """Return what the arena moves, to be copied before anything else; once."""
        moves = [ByteCopy(*move) for move in self._arena.moves]
        self._arena.moves.clear()
        return moves

    def _set_blocks(self, plan: Plan) -> None:
        """Tell new sequences where their blocks are."""
        if self._num_groups == len(self._arena.pools):
            return
        offset = self._arena.pool(self._block).offset
        for sequence in (*plan.admitted, *plan.forks):
            assert sequence.block is not None, "a sequence with a slot has a block"
            sequence.block_offset = offset(sequence.block)

    def _note_moves(self, plan: Plan, running: list[Sequence]) -> None:
        """Find who has to learn new offsets."""
        moved = [set[Handle]() for _ in self._arena.pools]
        for kind, handle in self._arena.moved:
            moved[kind].add(handle)
        self._arena.moved.clear()
        forks = set(plan.forks)
        for sequence in running:
            held = (sequence.pages, *(window.pages for window in sequence.windows))
            if sequence not in forks and any(not moved[group].isdisjoint(pages) for group, pages in enumerate(held)):
                self._stale.add(sequence)
            if sequence.block is not None and sequence.block in moved[self._block]:
                sequence.block_offset = self._arena.pool(self._block).offset(sequence.block)
                if sequence not in plan.admitted and sequence not in forks:
                    assert sequence.slot is not None
                    plan.blocks.append((sequence.slot, sequence.block_offset))

    def _run(self, sequence: Sequence, first: int, end: int) -> TableRun:
        """Return the entries [first, end) of every group; those of pages that a window has left are 0."""
        pools = self._arena.pools
        run = [pools[0].offsets(sequence.pages[first:end])]
        for group, window in enumerate(sequence.windows, 1):
            begin = max(window.first - first, 0)
            offsets = pools[group].offsets(window.pages[max(first - window.first, 0) : max(end - window.first, 0)])
            row = [0] * min(begin, end - first) + offsets
            run.append(row + [0] * (end - first - len(row)))
        return run

    def _resolve(self, copies: list[tuple[int, Handle, Handle]]) -> list[ByteCopy]:
        pools = self._arena.pools
        resolved = [
            ByteCopy(pools[kind].offset(source), pools[kind].offset(target), pools[kind].item_bytes)
            for kind, source, target in copies
        ]
        copies.clear()
        return resolved
