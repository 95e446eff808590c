"""The prefix cache: the tree with its snapshots, as sequences use it."""

from __future__ import annotations

from collections.abc import Hashable

from treadle.graph.state import State
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.changes import Changes
from treadle.runtime.state.checkpoints import CheckpointPolicy
from treadle.runtime.state.digest import item_key
from treadle.runtime.state.holders import Holders
from treadle.runtime.state.misses import Misses
from treadle.runtime.state.node import Match, Node
from treadle.runtime.state.prefix import PrefixTree
from treadle.runtime.state.room import Room
from treadle.runtime.state.snapshots import NEVER, Snapshot, Snapshots

BEGINS_ANSWER = 4
"""Tokens at a prompt's end that may differ when its answer is history: what opens the thinking."""
MOST_BRANCHES = 32
"""Where more than these part, it is not one conversation that went on otherwise."""

RECENT_CHECKPOINTS = 2


class PrefixCache:
    """Finds what was computed before, and keeps what sequences leave behind."""

    def __init__(
        self, arena: Arena, state: State, holders: dict[int, Holders], changes: Changes, *, max_step_tokens: int,
        enabled: bool, policy: CheckpointPolicy, budget_bytes: int | None,
    ) -> None:  # fmt: skip
        """Unless ``enabled``, only what a preempted request left is found, and only by itself."""
        self._arena, self._state, self._holders, self._changes = arena, state, holders, changes
        self._page_tokens = state.page_tokens
        self._block = len(state.groups) if state.block is not None else None
        self.policy, self.enabled = policy, enabled
        self.snapshots = Snapshots(arena.pools, [pool.item_bytes for pool in arena.pools], budget_bytes)
        self.tree = PrefixTree(
            arena.pool(0), state.page_tokens, self.snapshots, needs_snapshots=state.needs_checkpoints
        )
        self.room = Room(arena, state, self.tree, holders, max_step_tokens)
        self.misses = Misses(self.tree, state.page_tokens, needs_snapshots=state.needs_checkpoints)
        self.tree.on_release(self.misses.note_pages)
        self.tree.dropped = self.misses.note_snapshot
        self._step = 0
        # What the step being planned copies from or to; locked until it is planned.
        self._fixed: list[Snapshot] = []

    def match(self, sequence: Sequence) -> Match | None:
        """Return what is known of a sequence, locked; None if the next step will know enough more to wait for it."""
        match = self.tree.match(sequence.readable, self.salt(sequence), self._step)
        if match.later >= match.position + self.policy.least_tokens:
            return None
        self.tree.lock(match.node)
        if match.snapshot is not None:
            self.lock(match.snapshot)
        return match

    def explain(self, sequence: Sequence, match: Match) -> dict[str, int]:
        """Return why the tokens of a new prompt that are computed are, by reason; dead answers go first."""
        self._demote_dead(sequence, match)
        return self.misses.explain(sequence, match, self.enabled)

    def _demote_dead(self, sequence: Sequence, match: Match) -> None:
        """Let answers be evicted first that the same conversation went on without.

        Templates strip the thinking of earlier turns: a prompt that knows all of an earlier one, but for what began
        the answer, and goes on otherwise, leaves that answer behind for good.
        """
        node = match.deepest
        if len(node.children) > MOST_BRANCHES:
            return
        for key, child in list(node.children.items()):
            parted = match.known + node.common_tokens(key, sequence.tokens, self._page_tokens)
            last = min(parted + BEGINS_ANSWER, sequence.prompt_len - 1)
            answers = 0
            for each in child.below():
                answers += each.answer > 0
                if each.answer > last:
                    break
            else:
                if answers:
                    self.tree.demote(child)

    def supersede(self, sequence: Sequence) -> None:
        """Let checkpoints go first that a conversation has left behind.

        The last two on its way stay as they are, to go on from and to answer the last turn again, and so do those at
        which others part.
        """
        recent = 0
        for node in sequence.node.path() if sequence.node is not None else ():
            if node.snapshots and recent < RECENT_CHECKPOINTS:
                recent += 1
            elif len(node.children) == 1:
                for snapshot in node.snapshots:
                    self.snapshots.demote(snapshot)

    def dismiss(self, match: Match) -> None:
        """Undo the locks of a match that is not used."""
        if match.snapshot is not None:
            self.unlock(match.snapshot)
        self.tree.unlock(match.node)

    def copy_from(self, match: Match) -> None:
        """Keep a match's snapshot, which the step being planned copies from, until it is planned."""
        if match.snapshot is not None:
            self._fixed.append(match.snapshot)

    def consume(self, snapshot: Snapshot) -> None:
        """Take a snapshot out of the tree; its references become the caller's."""
        self.unlock(snapshot)
        self.snapshots.remove(snapshot)

    def lock(self, snapshot: Snapshot) -> None:
        """Keep a snapshot until it is unlocked, and count what it holds as used."""
        self.snapshots.lock(snapshot)
        for kind, holders in self._holders.items():
            holders.hold(snapshot.items[kind])

    def unlock(self, snapshot: Snapshot) -> None:
        """Undo one ``lock``."""
        self.snapshots.unlock(snapshot)
        for kind, holders in self._holders.items():
            holders.let_go(snapshot.items[kind])

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the tree share the full pages among a sequence's first ``num_tokens`` tokens."""
        count = num_tokens // self._page_tokens
        if count == 0:
            return
        node = self.tree.insert(sequence.tokens, sequence.pages[:count], self.salt(sequence))
        self.tree.lock(node)
        self.leave(sequence)
        sequence.node = node

    def leave(self, sequence: Sequence) -> None:
        """Let go of the part of the tree that a sequence uses."""
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
            sequence.node = None

    def checkpoint(self, sequence: Sequence) -> Snapshot | None:
        """Keep what the step being planned leaves behind a sequence's chunk, which ends with a page.

        Windows are shared, the block is copied behind the program. Where there is no room there is no checkpoint; where
        there is one already, none is made.
        """
        node, position = sequence.node, sequence.computed
        assert node is not None, "the pages up to a checkpoint are in the tree"
        if any(not each.tail for each in node.snapshots):
            return None
        need = {} if self._block is None else {self._block: 1}
        if not self._keep_budget(sum(self._arena.pool(kind).item_bytes for kind in need)):
            return None
        if not self.room.fits(need) or not self.room.make(need):
            return None
        items = [(), *self._share_windows(sequence, position)]
        if self._block is not None:
            assert sequence.block is not None
            block = self._arena.pool(self._block).take(1, "checkpoint")
            self._changes.copy_after(self._block, sequence.block, block[0])
            items.append(tuple(block))
        snapshot = Snapshot(position=position, tail=b"", items=tuple(items), born=self._step)
        self.tree.keep(node, snapshot)
        self.lock(snapshot)
        self._fixed.append(snapshot)
        return snapshot

    def leave_tail(self, sequence: Sequence, *, comes_back: bool) -> tuple[Node, Snapshot] | None:
        """Keep the state of a sequence that leaves, whose full pages are in the tree: what it holds changes owner.

        ``comes_back``: it will be the one to go on from there. Returns what is there then, and where.
        """
        position = sequence.num_valid
        full, rest = divmod(position, self._page_tokens)
        if position == 0 or not sequence.is_exact or not (rest or self._state.needs_checkpoints):
            return None
        node = sequence.node if full else self.tree.root(self.salt(sequence))
        assert node is not None
        tail = sequence.tokens[position - rest : position].tobytes()
        owner = sequence.id if comes_back else ""
        known = next((each for each in node.snapshots if each.tail == tail), None)
        if known is not None:
            known.owner = known.owner or owner
            return node, known
        if not comes_back and not self._keep_budget(self._tail_bytes(rest)):
            return None
        items = [(sequence.pages.pop(full),) if rest else (), *self._share_windows(sequence, position)]
        if self._block is not None:
            assert sequence.block is not None
            self._holders[self._block].let_go([sequence.block])
            items.append((sequence.block,))
            sequence.block = None
        snapshot = Snapshot(position=position, tail=tail, items=tuple(items), born=NEVER, owner=owner)
        self.tree.keep(node, snapshot)
        return node, snapshot

    def snapshot_keys(self, position: int, tail: bytes, digests: list[bytes]) -> list[list[bytes]]:
        """Return the keys of the items of a snapshot by kind; ``digests`` are of no page, one page, two ... before it.

        Whole pages of windows are called like pages of the first group, whoever has them.
        """
        full = position // self._page_tokens
        keys = [[item_key(digests[full], 0, tail)] if tail else []]
        for kind, group in enumerate(self._state.groups[1:], 1):
            first = group.first_needed(position) // self._page_tokens
            keys.append([item_key(digests[page + 1], kind) for page in range(first, full)])
            if tail:
                keys[-1].append(item_key(digests[full], kind, tail))
        if self._block is not None:
            keys.append([item_key(digests[full], self._block, tail)])
        return keys

    def settle(self) -> None:
        """Note that a step is planned."""
        for snapshot in self._fixed:
            self.unlock(snapshot)
        self._fixed.clear()
        self._step += 1

    def forget(self, sequence: Sequence) -> None:
        """Drop what only a sequence itself could have found again, now that it will not come back."""
        if not self.enabled and sequence.preemptions:
            self.tree.forget(self.salt(sequence))

    def discard(self, node: Node | None) -> None:
        """Forget what is not to be trusted: ``node`` and those above it that nothing else needs."""
        if node is not None:
            self.tree.discard(node)

    def salt(self, sequence: Sequence) -> Hashable:
        """Return whose prefixes a sequence shares."""
        return sequence.cache_salt if self.enabled else ("alone", sequence.id)

    def _share_windows(self, sequence: Sequence, position: int) -> list[tuple[int, ...]]:
        """Return the pages of every window that a token at ``position`` sees, with a reference of each for the tree."""
        shared = []
        for group, window in enumerate(sequence.windows, 1):
            first = self._state.groups[group].first_needed(position) // self._page_tokens
            pages = window.pages[first - window.first : self.room.pages_for(position) - window.first]
            self._arena.pool(group).share(pages)
            shared.append(tuple(pages))
        return shared

    def _tail_bytes(self, rest: int) -> int:
        pools = self._arena.pools
        block = 0 if self._block is None else pools[self._block].item_bytes
        return block + (pools[0].item_bytes if rest else 0)

    def _keep_budget(self, num_bytes: int) -> bool:
        """Evict snapshots until one more of so many bytes is within the budget."""
        while self.snapshots.over_budget(num_bytes):
            oldest = self.snapshots.oldest
            if oldest is None:
                return False
            self.tree.drop(oldest)
        return True
