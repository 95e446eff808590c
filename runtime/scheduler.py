"""Continuous batching: which sequences the next step advances. Host only, no tensors.

The oldest request always advances: memory for it is taken from what is kept for later first, then from the youngest.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from treadle.runtime.plan import Chunk, Plan
from treadle.runtime.request import FinishReason
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.memory import StateMemory
from treadle.runtime.state.room import Others

LOOK_AHEAD = 8
"""so many at the head of the queue may wait for their state; that of others is brought nearer meanwhile"""

DECODES_A_PROMPT = 16
"""so many answers under way for each prompt to compute, or a single prompt, and prompts are cut small"""


_order = attrgetter("order")


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
        self.give(-count, cost)
        return count

    def give(self, count: int, cost: float) -> None:
        """Take back ``count`` tokens that were not computed after all."""
        self._tokens += count
        self._work += count * cost


class Scheduler:
    """Owns the queue and the slots; asks ``memory`` who may come in and grow.

    ``schedule`` plans a step, ``collected`` takes back each plan once the step has run, in order.
    """

    def __init__(
        self,
        memory: StateMemory,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        chunk_tokens: int,
        attention_tokens: float = math.inf,
    ) -> None:
        assert max_num_seqs <= max_step_tokens, "a step must be able to advance every running sequence"
        self.memory = memory
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """sequences with a slot, the oldest first"""
        self.prefetching: list[Sequence] = []
        """those that only want their state to be near"""
        self.arrived: list[Sequence] = []
        """those of them whose state is; taken by the caller"""
        self.preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = chunk_tokens
        self._attention_tokens = attention_tokens
        self._slots = list(reversed(range(max_num_seqs)))
        # Pages that sequences lack in the step being planned and that leaving ones will give back.
        self._lacking = 0
        # Those near the head of the queue whose state is on its way.
        self._ahead: list[Sequence] = []
        self._others = Others(self.running, self._ahead)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._slots)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others."""
        self.waiting.append(sequence)

    def schedule(self) -> Plan | None:
        """Return the next step, None if nothing can advance before a step in flight is collected."""
        plan = Plan()
        self._lacking = 0
        self.memory.poll(steps=bool(self.running))
        self._plan_decodes(plan)
        room = _Room(self._max_step_tokens - len(plan.decodes), self._work_beside(len(plan.decodes)))
        # Copies, since forks join the list and the preempted leave it.
        for sequence in list(self.running):
            if sequence.prefilling and room.left and self._may_advance(sequence):
                self._plan_chunk(plan, sequence, room)
        self._plan_newcomers(plan, room)
        for sequence in list(self.prefetching):
            if self.memory.prefetch(sequence, self._others) is not None:
                self.prefetching.remove(sequence)
                self.arrived.append(sequence)
        for sequence in plan.sampled:
            sequence.pending += 1
        if not plan.num_tokens:
            return None
        self.memory.settle(plan, self.running)
        return plan

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
        if sequence in self.prefetching:
            self.prefetching.remove(sequence)
        elif sequence in self.arrived:
            self.arrived.remove(sequence)
        elif sequence.slot is None:
            self.waiting.remove(sequence)
            self.memory.cache.forget(sequence)
        elif sequence.in_flight == 0:
            self._release(sequence)

    def heal(self) -> dict[str, int]:
        """While nothing runs, give back memory that somebody forgot; return who had taken how many pages."""
        assert not self.running
        return self.memory.heal()

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
        decodes = plan.decodes
        for sequence in list(self.running):
            if sequence.slot is None or sequence.leaving or sequence.finish_reason:
                continue
            # What is in flight may already end it; then nothing is left to compute.
            if sequence.computed < sequence.prefill_end or sequence.remaining <= 0:
                continue
            if sequence.computed == sequence.room:
                take = partial(self.memory.grow, sequence, len(decodes))
                if not self._make_room(sequence, take):
                    continue
            sequence.computed += 1
            sequence.in_flight += 1
            decodes.append(sequence)

    def _plan_newcomers(self, plan: Plan, room: _Room) -> None:
        """Let sequences in, the oldest first. Whose state is on its way is passed by the next, if there is room for
        both: a store may be slow."""
        self._ahead.clear()
        while room.left and len(self._ahead) < min(len(self._slots), LOOK_AHEAD):
            sequence = self._next
            if sequence is None or self._may_fork(sequence):
                break
            if self.memory.awaits(sequence, self._others):
                self._ahead.append(sequence)
                continue
            if not self._admit(sequence, plan.num_seqs):
                break
            if not self._plan_chunk(plan, sequence, room):
                if sequence.slot is not None:
                    self._preempt(sequence)
                break
            plan.admitted.append(sequence)
        first = itertools.islice(self.waiting, LOOK_AHEAD)
        self.memory.look_ahead(each for each in first if each not in self._ahead)

    @property
    def _next(self) -> Sequence | None:
        """The first in the queue whose state is not on its way."""
        return next((each for each in self.waiting if each not in self._ahead), None)

    @staticmethod
    def _may_advance(sequence: Sequence) -> bool:
        return sequence.slot is not None and not sequence.leaving and sequence.finish_reason is None

    def _plan_chunk(self, plan: Plan, sequence: Sequence, room: _Room) -> bool:
        """Plan as much of a prompt as there is room for; False if it lacks memory."""
        start = sequence.computed
        cost = 1 + start / self._attention_tokens
        count = room.take(self.memory.chunk_end(sequence) - start, cost)
        if not self._make_room(sequence, partial(self.memory.extend, sequence, start + count, plan.num_seqs)):
            room.give(count, cost)
            return False
        sequence.computed = start + count
        sequence.in_flight += 1
        samples = sequence.computed == sequence.prefill_end
        self.memory.advanced(sequence)
        forks = self._fork(sequence) if samples and sequence.starts_group else ()
        plan.chunks.append(Chunk(sequence=sequence, start=start, count=count, samples=samples, forks=forks))
        return True

    def _may_fork(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence's prompt is being computed by another one of its group."""
        return sequence.starts_group and any(
            each.group == sequence.group and each.prefilling and each.starts_group and not each.finish_reason
            for each in self.running
        )

    def _fork(self, leader: Sequence) -> tuple[Sequence, ...]:
        """Give a slot to those of the leader's group that wait for its prompt, as far as slots and pages go.

        Who finds no room finds most of it in the tree later.
        """
        forks = []
        while len(self._slots) > len(self._ahead) and (sequence := self._next) is not None:
            alike = sequence.group == leader.group and sequence.starts_group
            if not alike or not self.memory.fork(leader, sequence, self._others):
                break
            self._join(sequence)
            sequence.in_flight += 1
            sequence.computed = sequence.prefill_end = leader.prompt_len
            sequence.first_step_s = time.monotonic()
            sequence.num_cached = leader.num_cached
            forks.append(sequence)
        return tuple(forks)

    def _admit(self, sequence: Sequence, row: int) -> bool:
        """Give a waiting sequence a slot and row ``row`` of the step, if there is memory for it."""
        if not self.memory.admit(sequence, self._others, row):
            return False
        self._join(sequence)
        sequence.prefill_end = len(sequence.tokens)
        sequence.prompt_from = len(sequence.prompt_logprobs)
        if sequence.first_step_s is None:
            sequence.first_step_s = time.monotonic()
            sequence.num_cached = sequence.computed
            self.query_tokens += sequence.prompt_len
            self.hit_tokens += sequence.computed
        return True

    def _make_room(self, sequence: Sequence, take: Callable[[], bool]) -> bool:
        """Let a running sequence take memory, at the price of the youngest; False if it must skip this step."""
        while not take():
            if self.memory.sessions.give_way():
                continue
            leaving = (len(each.pages) for each in self.running if each.leaving or each.finish_reason)
            promised = self.memory.promised + sum(leaving)
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
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue, where it stood. What it leaves is kept for as long as there is memory."""
        self.memory.vacate(sequence, comes_back=True)
        self._leave(sequence)
        sequence.leaving = False
        sequence.computed = sequence.prefill_end = 0
        sequence.preemptions += 1
        self.preemptions += 1
        bisect.insort_left(self.waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        """Take back everything from a finished sequence."""
        if sequence.finish_reason == "error":
            self.memory.discard(sequence)
        else:
            self.memory.vacate(sequence)
        self._leave(sequence)

    def _join(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.slot = self._slots.pop()
        bisect.insort(self.running, sequence, key=_order)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        sequence.slot = None
        self.running.remove(sequence)
