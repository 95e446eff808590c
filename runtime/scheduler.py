"""Continuous batching: which sequences the next step advances, and which pages they get. Host only, no tensors.

The oldest request always advances: memory for it is taken from the prefix tree first, then from the youngest.
"""

from __future__ import annotations

import math
import time
from collections import deque

from treadle.runtime.plan import ByteCopy, Chunk, Plan
from treadle.runtime.request import FinishReason
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.pages import PageAllocator
from treadle.runtime.state.prefix import PrefixTree

CALM_PAGES = 8
"""pages that every running sequence must be able to grow by before a preempted one comes back: hysteresis"""


class QueueFull(RuntimeError):
    """The bounded queue takes no more requests now (HTTP 429); says its length."""


DECODES_A_PROMPT = 16
"""so many answers under way for each prompt to compute, or a single prompt, and prompts are cut small"""


class _Room:
    """What a step may still take in of prompts: tokens, and work."""

    def __init__(self, tokens: int, work: float) -> None:
        self._tokens, self._work = tokens, work

    @property
    def left(self) -> bool:
        """Whether another chunk fits."""
        return self._tokens > 0 and self._work > 0

    def take(self, wanted: int, cost: float) -> int:
        """Return how many of ``wanted`` tokens fit, at least one, each of which is work worth ``cost`` first tokens."""
        affordable = self._tokens if self._work == math.inf else max(int(self._work / cost), 1)
        count = min(wanted, self._tokens, affordable)
        self._tokens -= count
        self._work -= count * cost
        return count


class Scheduler:
    """Owns the queue, the slots and the pages.

    ``schedule`` plans a step, ``collected`` takes back each plan once the step has run, in order.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_tokens: int,
        page_bytes: int,
        max_num_seqs: int,
        max_step_tokens: int,
        chunk_tokens: int,
        attention_tokens: float = math.inf,
        prefix_cache: bool,
    ) -> None:
        assert max_num_seqs <= max_step_tokens, "a step must be able to advance every running sequence"
        self.allocator = allocator
        self.tree = PrefixTree(allocator, page_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """sequences with a slot, the oldest first"""
        self.preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self._page_tokens, self._page_bytes = page_tokens, page_bytes
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = chunk_tokens
        self._attention_tokens = attention_tokens
        self._prefix_cache = prefix_cache
        self._slots = list(reversed(range(max_num_seqs)))
        # Pages that sequences lack in the step being planned and that leaving ones will give back.
        self._lacking = 0

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._slots)

    @property
    def pages_held(self) -> int:
        """Pages that sequences use; the rest is free or could be evicted at once."""
        return self.allocator.total - self._available

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others."""
        self.waiting.append(sequence)

    def schedule(self) -> Plan | None:
        """Return the next step, None if nothing can advance before a step in flight is collected."""
        plan = Plan()
        self._lacking = 0
        self._plan_decodes(plan)
        room = _Room(self._max_step_tokens - len(plan.decodes), self._work_beside(len(plan.decodes)))
        # A copy, since forks join the list.
        for sequence in list(self.running):
            if sequence.prefilling and not sequence.leaving and not sequence.finish_reason and room.left:
                self._plan_chunk(plan, sequence, room)
        while room.left and self.waiting and self._slots:
            if self._may_fork(self.waiting[0]) or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            plan.admitted.append(sequence)
            plan.tables.append((len(plan.decodes) + len(plan.chunks), 0, (sequence.pages,)))
            self._plan_chunk(plan, sequence, room)
        for sequence in (*plan.sequences, *plan.forks):
            sequence.in_flight += 1
        for sequence in plan.sampled:
            sequence.pending += 1
        return plan if plan.num_tokens else None

    def collected(self, plan: Plan) -> None:
        """Note that a plan has run and its tokens are known: give back what no step in flight uses any more."""
        for sequence in plan.sampled:
            sequence.pending -= 1
        for sequence in (*plan.sequences, *plan.forks):
            sequence.in_flight -= 1
            if sequence.in_flight == 0:
                if sequence.finish_reason:
                    self._release(sequence)
                elif sequence.leaving:
                    self._preempt(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands; what it holds is given back at once, or when its steps are collected."""
        assert sequence.finish_reason is None
        sequence.finish_reason = reason
        if sequence.slot is None:
            self.waiting.remove(sequence)
        elif sequence.in_flight == 0:
            self._release(sequence)

    def heal(self) -> dict[str, int]:
        """While nothing runs, give back pages that somebody forgot; return who had taken how many.

        All that may be left then is the tree's own reference of each of its pages, under no lock.
        """
        assert not self.running
        leaked: dict[str, int] = {}
        if self.tree.evictable != self.tree.num_pages:
            for page in self.tree.force_unlock():
                leaked[self.allocator.owner(page)] = leaked.get(self.allocator.owner(page), 0) + 1
        if self.allocator.num_refs != self.tree.num_pages:
            for owner, count in self.allocator.reclaim(self.tree.pages()).items():
                leaked[owner] = leaked.get(owner, 0) + count
        return leaked

    def _work_beside(self, num_decodes: int) -> float:
        """Return how much work on prompts a step may do beside its decodes, in tokens at the start of a prompt.

        Where many wait for a first token, large steps serve them best. Where nearly all are being answered, the time
        between their tokens counts: an arriving prompt is cut so small that a step with a part of it takes little
        longer, but never below half of a step's share, lest it wait until the others are done.
        """
        num_prompts = len(self.waiting) + sum(sequence.prefilling for sequence in self.running)
        calm = num_decodes > 0 and num_prompts <= max(1, num_decodes // DECODES_A_PROMPT)
        return max(self._chunk_tokens - num_decodes, self._chunk_tokens // 2, 1) if calm else math.inf

    def _plan_decodes(self, plan: Plan) -> None:
        # A copy, since a preempted sequence leaves the list; oldest first, and victims are taken from the other end.
        for sequence in list(self.running):
            if sequence.slot is None or sequence.prefilling or sequence.leaving or sequence.finish_reason:
                continue
            # What is in flight may already end it; then nothing is left to compute.
            if sequence.remaining <= 0:
                continue
            if sequence.computed == len(sequence.pages) * self._page_tokens and not self._grow(plan, sequence):
                continue
            sequence.computed += 1
            plan.decodes.append(sequence)

    def _plan_chunk(self, plan: Plan, sequence: Sequence, room: _Room) -> None:
        start = sequence.computed
        count = room.take(sequence.prefill_end - start, 1 + start / self._attention_tokens)
        sequence.computed = start + count
        samples = sequence.computed == sequence.prefill_end
        # Known to the tree from now on, and so to others even of this step: every layer writes a step's keys and
        # values before it reads any, and later steps run later.
        self._remember(sequence, sequence.computed)
        forks = self._fork(plan, sequence) if samples and sequence.starts_group else ()
        plan.chunks.append(Chunk(sequence=sequence, start=start, count=count, samples=samples, forks=forks))

    def _may_fork(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence's prompt is being computed by another one of its group."""
        return sequence.starts_group and any(
            each.group == sequence.group and each.prefilling and each.starts_group and not each.finish_reason
            for each in self.running
        )

    def _fork(self, plan: Plan, leader: Sequence) -> tuple[Sequence, ...]:
        """Give a slot to those of the leader's group that wait for its prompt, as far as slots and pages go.

        They share its full pages and get a copy of the last one. Who finds no room finds most of it in the tree later.
        """
        forks = []
        full, rest = divmod(leader.prompt_len, self._page_tokens)
        while self.waiting and self._slots:
            sequence = self.waiting[0]
            alike = sequence.group == leader.group and sequence.starts_group
            if not alike or bool(rest) + self._headroom(sequence) > self._available:
                break
            self.waiting.popleft()
            self._share_node(sequence, leader)
            self.allocator.share(leader.pages[:full])
            sequence.pages = leader.pages[:full] + self._take(bool(rest), sequence)
            if rest:
                plan.after.append(ByteCopy(leader.pages[full], sequence.pages[full], self._page_bytes))
            plan.fork_tables.append((sequence.pages,))
            sequence.slot = self._slots.pop()
            sequence.computed = sequence.prefill_end = leader.prompt_len
            self.running.append(sequence)
            sequence.first_step_s = time.monotonic()
            sequence.num_cached = leader.num_cached
            forks.append(sequence)
        return tuple(forks)

    def _share_node(self, sequence: Sequence, leader: Sequence) -> None:
        if leader.node is not None:
            self.tree.lock(leader.node)
            sequence.node = leader.node

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the pages of all its known tokens, if that leaves room to breathe."""
        cached: list[int] = []
        if self._prefix_cache:
            cached, node = self.tree.match(sequence.readable)
            self.tree.lock(node)
            sequence.node = node
        need = -(-len(sequence.tokens) // self._page_tokens) - len(cached)
        if need + self._headroom(sequence) > self._available:
            self._unlock(sequence)
            return False
        self.allocator.share(cached)
        sequence.pages = cached + self._take(need, sequence)
        sequence.slot = self._slots.pop()
        sequence.computed = len(cached) * self._page_tokens
        sequence.prefill_end = len(sequence.tokens)
        sequence.prompt_from = len(sequence.prompt_logprobs)
        self.running.append(sequence)
        if sequence.first_step_s is None:
            sequence.first_step_s = time.monotonic()
            sequence.num_cached = sequence.computed
            self.query_tokens += sequence.prompt_len
            self.hit_tokens += sequence.computed
        return True

    def _headroom(self, newcomer: Sequence) -> int:
        """Return the pages that must stay available beside ``newcomer``'s, so that it does not push others out."""
        if not self.running:
            return 0
        calm = CALM_PAGES if newcomer.preemptions else 1
        return sum(
            min(calm, -(-each.remaining // self._page_tokens))
            for each in (*self.running, newcomer)
            if each.remaining > 0
        )

    @property
    def _available(self) -> int:
        return self.allocator.free + self.tree.evictable

    def _take(self, count: int, sequence: Sequence) -> list[int]:
        self.tree.evict(count - self.allocator.free)
        return self.allocator.take(count, sequence.id)

    def _grow(self, plan: Plan, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page, at the price of the youngest; False if it must skip this step."""
        while self._available == 0:
            promised = sum(len(each.pages) for each in self.running if each.leaving or each.finish_reason)
            if self._lacking < promised:
                self._lacking += 1
                return False
            victim = next(each for each in reversed(self.running) if not each.leaving and not each.finish_reason)
            if victim.in_flight:
                # Its steps in flight use its pages, and bring a token that it must know before it waits.
                victim.leaving = True
            else:
                self._preempt(victim)
            if victim is sequence:
                return False
        page = self._take(1, sequence)[0]
        plan.tables.append((len(plan.decodes), len(sequence.pages), ((page,),)))
        sequence.pages.append(page)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue. The tree keeps its pages for as long as they are not needed."""
        self._vacate(sequence, sequence.num_valid)
        sequence.leaving = False
        sequence.computed = sequence.prefill_end = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take back everything from a finished sequence; pages of bad content leave the tree."""
        if sequence.finish_reason == "error":
            node = sequence.node
            self._vacate(sequence, 0)
            if node is not None:
                self.tree.discard(node)
        else:
            self._vacate(sequence, sequence.num_valid)

    def _vacate(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.slot is not None
        self._remember(sequence, num_tokens)
        self._unlock(sequence)
        self.allocator.release(sequence.pages)
        sequence.pages = []
        self._slots.append(sequence.slot)
        sequence.slot = None
        self.running.remove(sequence)

    def _remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the prefix tree share the full pages among the first ``num_tokens`` tokens."""
        count = num_tokens // self._page_tokens
        if not self._prefix_cache or count == 0:
            return
        node = self.tree.insert(sequence.tokens, sequence.pages[:count])
        self.tree.lock(node)
        self._unlock(sequence)
        sequence.node = node

    def _unlock(self, sequence: Sequence) -> None:
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
            sequence.node = None
