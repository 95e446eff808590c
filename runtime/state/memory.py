"""State memory: what sequences hold of the arena, and what is kept of them for others. Host only, no tensors.

The scheduler asks: who may come in, who may grow, what is given back. It knows no page itself.

Every sequence has pages of the first group for all its known tokens, pages of each other group for what its window
reaches, and a block, as far as the model has such states.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from treadle.graph.state import State
from treadle.runtime.plan import ByteCopy, Plan
from treadle.runtime.sequence import Sequence, Window
from treadle.runtime.state.accounts import Accounts
from treadle.runtime.state.arena import Arena, Kind
from treadle.runtime.state.cache import PrefixCache
from treadle.runtime.state.changes import Changes
from treadle.runtime.state.checkpoints import CheckpointPolicy
from treadle.runtime.state.holders import Holders
from treadle.runtime.state.leaks import reclaim
from treadle.runtime.state.node import Match, Node
from treadle.runtime.state.restorer import Restorer
from treadle.runtime.state.room import Counts, Others
from treadle.runtime.state.sessions import Sessions
from treadle.runtime.state.sinker import Sinker
from treadle.runtime.state.snapshots import Snapshot
from treadle.runtime.state.tiers.tiers import Tiers
from treadle.runtime.state.wait import Wait


def arena_kinds(state: State) -> tuple[Kind, ...]:
    """Return what an arena is asked to hold: pages of each group, then blocks."""
    groups = tuple(Kind(group.name, group.page_bytes) for group in state.groups)
    return groups if state.block is None else (*groups, Kind("block", state.block.block_bytes))


class StateMemory:
    """Owns what the arena holds. Memory for sequences is taken from what is kept for later where nothing is free."""

    def __init__(
        self,
        arena: Arena,
        state: State,
        *,
        max_step_tokens: int,
        prefix_cache: bool = True,
        checkpoint_bytes: int | None = None,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        """``checkpoint_bytes`` bounds what snapshots take, besides that the arena does."""
        self.arena, self._state = arena, state
        self.pages = arena.pool(0)
        self._page_tokens = state.page_tokens
        self._windows = range(1, len(state.groups))
        self._block = len(state.groups) if state.block is not None else None
        self._holders = {kind: Holders(arena.pool(kind)) for kind in range(1, len(arena.pools))}
        self._changes = Changes(arena, state)
        self.cache = PrefixCache(
            arena, state, self._holders, self._changes, max_step_tokens=max_step_tokens, enabled=prefix_cache,
            policy=policy or CheckpointPolicy(page_tokens=state.page_tokens), budget_bytes=checkpoint_bytes,
        )  # fmt: skip
        self._room = self.cache.room
        self.tiers: Tiers | None = None
        self.accounts = Accounts(self.cache.misses)
        self.sessions = Sessions(self.cache, page_bytes=self.pages.item_bytes, arena_bytes=len(arena.bytes))

    def attach(self, tiers: Tiers, flight_bytes: int) -> None:
        """Let state go to ``tiers``, about ``flight_bytes`` at a time, and come back."""
        self.tiers = tiers
        self._sinker = Sinker(self.arena, self.cache, tiers, flight_bytes)
        self._restorer = Restorer(self.arena, self.cache, self._holders, tiers, self._sinker, self._state)

    @property
    def pages_held(self) -> int:
        """Pages of the first group that sequences use; the rest is free or could be evicted at once."""
        return self.pages.used - self._room.evictable_pages

    @property
    def pages_total(self) -> int:
        """Pages of the first group that there could be, beside what other kinds hold."""
        return self.arena.available(0) + self.pages.used

    @property
    def busy(self) -> bool:
        """Whether anything is on its way to a tier or back."""
        return self.tiers is not None and (self._sinker.busy or self._restorer.busy)

    @property
    def promised(self) -> int:
        """Pages of the first group that can be had once they have arrived elsewhere."""
        return 0 if self.tiers is None else self._sinker.promised

    def poll(self, *, steps: bool = False) -> None:
        """Go on with transfers; before a step is planned, behind all steps that are launched.

        ``steps``: whether sequences run.
        """
        self.sessions.poll()
        if self.tiers is not None:
            self.tiers.poll(steps=steps)
            self._sinker.poll()
            self._restorer.poll()

    def look_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Bring what those who cannot come in yet will want into host memory."""
        if self.tiers is not None:
            for sequence in waiting:
                self._restorer.look_ahead(sequence)

    def wait(self, limit_s: float) -> None:
        """Block until a transfer is done or a connector has answered, for ``limit_s`` seconds at most; not while a
        transfer is about to begin."""
        if self.tiers is not None and (self.busy or self.tiers.asking) and not self._restorer.begins:
            self.tiers.wait(limit_s)

    def moves(self) -> list[ByteCopy]:
        """Return what is to be copied now if no step is planned."""
        return self._changes.moves()

    def longest(self, max_len: int) -> int:
        """Return how many tokens a sequence can have that is alone, at most ``max_len``."""
        return self._room.longest(max_len)

    def awaits(self, sequence: Sequence, others: Others) -> bool:
        """Whether a waiting sequence's state is on its way to the device, or may be soon."""
        return self.tiers is not None and self._restorer.holds(sequence, others)

    def admit(self, sequence: Sequence, others: Others, row: int) -> bool:
        """Let a sequence in, in row ``row`` of the step, if that leaves others room to breathe, or to come in.

        ``sequence.computed`` is then what was known of it.
        """
        match = self.cache.match(sequence)
        if match is None:
            return False
        if self.tiers is not None and match.position < sequence.wait.near:
            # Evicted while it waited for room; tiers may have it.
            sequence.wait = Wait()
            self.cache.dismiss(match)
            return False
        sequence.wait.near = match.position
        self.sessions.returned(sequence)
        beside, snapshot = self._room.beside(sequence, others), match.snapshot
        # Who comes back takes what it left; others go on from copies, if there is room for both.
        takes = snapshot is not None and snapshot.locks == 1 and snapshot.owner == sequence.id
        if snapshot is not None and snapshot.locks == 1 and not takes:
            takes = not self._room.fits(self._room.needs(sequence, match, False), beside)
        need = self._room.needs(sequence, match, takes)
        while not self._room.fits(need, beside):
            # Who would be alone does not wait for a lease to end.
            if any(others) or not self.sessions.give_way():
                self.cache.dismiss(match)
                return False
        if self.tiers is not None and not sequence.wait.asked:
            # There was no room to ask, or for what they have; there may be from the next step on.
            self.cache.dismiss(match)
            return False
        reasons = self.cache.explain(sequence, match) if sequence.preemptions == 0 else {}
        if not self._room.make(need):
            self.cache.dismiss(match)
            return False
        self.accounts.admitted(sequence, match.position, reasons, has_tiers=self.tiers is not None)
        sequence.wait = Wait()
        sequence.node = match.node
        sequence.computed = match.position
        self._fill(sequence, match, takes)
        self._changes.touch(sequence, row, 0, len(sequence.pages))
        if self._state.needs_checkpoints and self.cache.enabled:
            known = match.known if match.known > match.position else 0
            sequence.stops = self.cache.policy.stops(match.position, len(sequence.tokens), known, sequence.boundaries)
        return True

    def fork(self, leader: Sequence, sequence: Sequence, others: Others) -> bool:
        """Let a sequence begin at the end of its leader's prompt, if there is room.

        It shares full pages and gets copies of the last one and of the block.
        """
        full, rest = divmod(leader.prompt_len, self._page_tokens)
        need = {group: int(rest > 0) for group in range(len(self._state.groups))}
        if self._block is not None:
            need[self._block] = 1
        if not self._room.fits(need, self._room.beside(sequence, others)) or not self._room.make(need):
            return False
        if leader.node is not None:
            self.cache.tree.lock(leader.node)
            sequence.node = leader.node
        self.pages.share(leader.pages[:full])
        sequence.pages = leader.pages[:full]
        if rest:
            sequence.pages += self.pages.take(1, sequence.id)
            self._changes.copy_after(0, leader.pages[full], sequence.pages[full])
        sequence.room = len(sequence.pages) * self._page_tokens
        for group, source in zip(self._windows, leader.windows):
            window, holders = self._window(group, leader.prompt_len), self._holders[group]
            window.pages = source.pages[window.first - source.first : full - source.first]
            holders.share(window.pages)
            if rest:
                window.pages += holders.take(1, sequence.id)
                self._changes.copy_after(group, source.pages[full - source.first], window.pages[-1])
            sequence.windows.append(window)
        if self._block is not None:
            assert leader.block is not None
            (sequence.block,) = self._holders[self._block].take(1, sequence.id)
            self._changes.copy_after(self._block, leader.block, sequence.block)
        return True

    def prefetch(self, sequence: Sequence, others: Others) -> int | None:
        """Bring what is known of a sequence to the device; return how many tokens are, None if some may come yet."""
        if self.awaits(sequence, others):
            return None
        match = self.cache.match(sequence)
        if match is None:
            return None
        self.sessions.arrived(sequence, match)
        reasons = self.cache.misses.explain(sequence, match, self.cache.enabled)
        self.cache.dismiss(match)
        self.accounts.arrived(sequence, match.position, reasons)
        return match.position

    def grow(self, sequence: Sequence, row: int) -> bool:
        """Give a decoding sequence in row ``row`` of the step its next page; False if there is none."""
        need = {0: 1}
        if sequence.windows:
            need |= self._advance_windows(sequence, sequence.computed + 1)
        if not self.arena.can_take(need) and not (self._room.fits(need) and self._room.make(need)):
            return False
        first = len(sequence.pages)
        sequence.pages += self.pages.take(1, sequence.id)
        sequence.room += self._page_tokens
        for group, window in enumerate(sequence.windows, 1):
            window.pages += self._holders[group].take(need[group], sequence.id)
        self._changes.touch(sequence, row, first, first + 1)
        return True

    def extend(self, sequence: Sequence, end: int, row: int) -> bool:
        """Give a prompt in row ``row`` the pages that its tokens up to ``end`` need; False if there are none."""
        if not sequence.windows:
            return True
        need = self._advance_windows(sequence, end)
        if not self._room.fits(need) or not self._room.make(need):
            return False
        for group, window in enumerate(sequence.windows, 1):
            if need[group]:
                first = window.end
                window.pages += self._holders[group].take(need[group], sequence.id)
                self._changes.touch(sequence, row, first, window.end)
        return True

    def chunk_end(self, sequence: Sequence) -> int:
        """Return where the next chunk of a prompt must end at the latest."""
        return sequence.stops[-1] if sequence.stops else sequence.prefill_end

    def advanced(self, sequence: Sequence) -> None:
        """Note that a chunk is planned: what it computes is known to the tree from now on.

        Pages of the first group are so to others even of this step: every layer writes a step's keys and values before
        it reads any, and later steps run later. A checkpoint is there once the step has run.
        """
        if self.cache.enabled:
            self.cache.remember(sequence, sequence.computed)
        snapshot = None
        if sequence.stops and sequence.computed == sequence.stops[-1]:
            sequence.stops.pop()
            snapshot = self.cache.checkpoint(sequence)
        prompt_ends = sequence.computed == sequence.prefill_end and self.cache.enabled
        if self.tiers is not None and sequence.node is not None and (snapshot is not None or prompt_ends):
            self._sinker.offer(sequence.node, snapshot)

    def vacate(self, sequence: Sequence, *, comes_back: bool = False) -> None:
        """Take back all that a sequence holds. What is valid is kept for as long as its memory is not needed."""
        node, snapshot = None, None
        if self.cache.enabled or comes_back:
            self.cache.remember(sequence, sequence.num_valid)
            if sequence.node is not None and not comes_back:
                sequence.node.answer = sequence.prompt_len
                self.cache.supersede(sequence)
            kept: tuple[Node, Snapshot] | None = None
            if comes_back or self._state.needs_checkpoints:
                kept = self.cache.leave_tail(sequence, comes_back=comes_back)
            node, snapshot = kept or (sequence.node, None)
            if self.tiers is not None and node is not None:
                self._sinker.offer(node, snapshot, urgent=comes_back)
        sequence.left = sequence.num_valid
        self._give_back(sequence)
        if not comes_back:
            self.sessions.ended(sequence, node, snapshot)
            self.cache.forget(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds; its content is bad and leaves the tree."""
        node = sequence.node
        self._give_back(sequence)
        self.cache.discard(node)

    def settle(self, plan: Plan, running: list[Sequence]) -> None:
        """Complete a plan: where its items are, and what is copied before and behind its program."""
        self._changes.settle(plan, running)
        self.cache.settle()

    def heal(self) -> dict[str, int]:
        """While nothing runs, give back what somebody forgot; return who had taken how many items."""
        pins = self.sessions.suspend()
        leaked = reclaim(self.arena, self.cache, self._holders)
        self.sessions.resume(pins)
        return leaked

    def _fill(self, sequence: Sequence, match: Match, takes: bool) -> None:
        """Give a sequence what it begins with."""
        snapshot, rest = match.snapshot, match.position % self._page_tokens
        items = [()] * len(self.arena.pools) if snapshot is None else snapshot.items
        if snapshot is not None and takes:
            self.cache.consume(snapshot)
        else:
            self.cache.copy_from(match)
        self.pages.share(match.pages)
        sequence.pages = [*match.pages]
        for kind, handles in enumerate(items):
            whole = len(handles) - (rest > 0) if kind in self._windows else 0
            got = [*handles] if takes else self._reuse(kind, handles, whole, sequence)
            if kind == 0:
                sequence.pages += got
                sequence.pages += self.pages.take(
                    self._room.pages_for(len(sequence.tokens)) - len(sequence.pages), sequence.id
                )
                sequence.room = len(sequence.pages) * self._page_tokens
                continue
            holders = self._holders[kind]
            if takes:
                holders.hold(got)
            if kind == self._block:
                (sequence.block,) = got or holders.take(1, sequence.id)
            else:
                window = self._window(kind, match.position)
                window.pages = got
                sequence.windows.append(window)

    def _reuse(self, kind: int, handles: Ordered[int], whole: int, sequence: Sequence) -> list[int]:
        """Share the first ``whole`` items; return them and new ones, which get copies of the rest before the step."""
        holders = self._holders.get(kind)
        got = [*handles[:whole]]
        if holders is not None:
            holders.share(got)
        for source in handles[whole:]:
            got += self.pages.take(1, sequence.id) if holders is None else holders.take(1, sequence.id)
            self._changes.copy_before(kind, source, got[-1])
        return got

    def _window(self, group: int, position: int) -> Window:
        return Window(self._state.groups[group].first_needed(position) // self._page_tokens)

    def _advance_windows(self, sequence: Sequence, end: int) -> Counts:
        """Give back pages that no token from the next one on sees; return how many those up to ``end`` lack.

        Steps in flight that read them run before any that could write to them anew.
        """
        need: Counts = {}
        for group, window in enumerate(sequence.windows, 1):
            first = self._state.groups[group].first_needed(sequence.computed) // self._page_tokens
            if first > window.first:
                self._holders[group].release(window.pages[: first - window.first])
                del window.pages[: first - window.first]
                window.first = first
            need[group] = max(self._room.pages_for(end) - window.end, 0)
        return need

    def _give_back(self, sequence: Sequence) -> None:
        self._changes.forget(sequence)
        self.cache.leave(sequence)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.room = [], 0
        for group, window in enumerate(sequence.windows, 1):
            self._holders[group].release(window.pages)
        sequence.windows = []
        if self._block is not None and sequence.block is not None:
            self._holders[self._block].release([sequence.block])
        sequence.block = None
        sequence.stops = []
