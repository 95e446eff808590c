"""Writes a plan into the packet of a step (``graph.packet`` has its layout). Host only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.graph.buckets import Buckets, largest_shape
from treadle.graph.packet import (
    MAX_STOPS,
    SLOT_WIDTH,
    Column,
    Header,
    Sections,
    StepShape,
    packet_capacity,
    sections,
)
from treadle.graph.state import round_up
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.plan import ByteCopy, Chunk, Plan
from treadle.runtime.processors import RowProcessors
from treadle.runtime.sampler import Needs
from treadle.runtime.sequence import Sequence
from treadle.runtime.slot_load import SlotLoad, fork_load, slot_load

NUM_STAGES = 2
"""Steps in flight at most: while one runs, the next is written."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Packet(NamedTuple):
    """One step, ready to be sent."""

    data: Tensor
    """[n] int32, host memory that is written again two steps later"""
    shape: StepShape
    """of the step's tensors, a bucket's if ``captured``"""
    captured: bool
    num_rows: int
    """rows of logits that are somebody's, the first ones"""
    needs: Needs
    stage: int
    """which of NUM_STAGES sets of host memory is this step's"""
    loads: tuple[SlotLoad, ...] = ()
    """what slots get before the step"""
    before: tuple[ByteCopy, ...] = ()
    """what is copied inside the arena before the program runs"""
    after: tuple[ByteCopy, ...] = ()
    """and behind it"""
    scored: Scored | None = None
    processed: tuple[Processed, ...] = ()
    """the rows of logits that are changed in Python"""


class Scored(NamedTuple):
    """Tokens of prompts whose log-probabilities are wanted, [P] int64 on the host."""

    positions: Longs
    """which tokens of the flat batch give the logits"""
    targets: Longs
    """the tokens that came next"""
    num_top: int
    """alternatives wanted of any"""


class Processed(NamedTuple):
    """A row of logits that processors change."""

    row: int
    slot: int
    num_tokens: int
    """prompt and answer so far"""
    decodes: bool
    """the last of them is known to the device alone"""
    processors: RowProcessors


@dataclass(frozen=True)
class _Stage:
    data: Tensor
    ints: Ints
    longs: Longs


class PacketWriter:
    """Owns the host side of the packets."""

    def __init__(
        self, backend: Backend, buckets: Buckets, largest: StepShape, *, max_pages: int, nobody: int, vocab: int
    ) -> None:
        """``largest`` is what an uncaptured step may have; ``nobody`` the slot that padding points at.

        ``max_pages``: of a sequence in all groups of states together.
        """
        bound = largest_shape(largest, buckets)
        self.capacity = packet_capacity(bound, max_pages)
        """int32 of the largest packet"""
        self.bound = bound
        """the largest of each size"""
        self._buckets, self._nobody, self._vocab = buckets, nobody, vocab
        self._stages = []
        for _ in range(NUM_STAGES):
            data = backend.host(self.capacity * 4).view(torch.int32)
            ints: Ints = data.numpy()
            self._stages.append(_Stage(data, ints, ints.view(np.int64)))
        self._turn = 0
        self._count = np.arange(max(bound) + 1, dtype=np.int32)
        self._long_count = np.arange(bound.num_rows, dtype=np.int64)

    def write(self, plan: Plan) -> Packet:
        """Return the packet of a plan. What was returned NUM_STAGES calls ago must have run."""
        decodes, chunks = plan.decodes, plan.chunks
        sampled = plan.sampled
        exact = StepShape(plan.num_tokens, len(decodes) + len(chunks), len(sampled))
        # Forks have a row each and are no sequences of the step.
        wide = exact._replace(num_seqs=max(exact.num_seqs, exact.num_rows))
        bucket = self._buckets.find(wide, decodes_only=not chunks)
        shape = bucket or exact
        stage, at = self._next(shape)
        ints, longs = stage.ints, stage.longs
        if not chunks:
            self._frame(stage, shape, at, shape.num_seqs, len(sampled))
            slots: list[Any] = [seq.slot for seq in decodes]
            ints[at.slots : at.slots + len(slots)] = slots
            longs[at.sample_slots // 2 : at.sample_slots // 2 + len(slots)] = slots
        else:
            self._frame(stage, shape, at, len(decodes), len(sampled))
            self._write_mixed(stage, at, shape, plan)
        end = self._write_news(stage, at, plan)
        made = Packet(stage.data[:end], shape, bucket is not None, len(sampled), needs_of(sampled), self._turn)
        extras = made.needs.adjusted or chunks or plan.before or plan.after or plan.blocks
        return self._with_extras(made, plan, sampled) if extras else made

    def _with_extras(self, packet: Packet, plan: Plan, sampled: list[Sequence]) -> Packet:
        """Add what only some requests need, beside the packet itself."""
        loads = [slot_load(seq, self._vocab) for seq in plan.admitted]
        loads += [
            fork_load(seq, admission(seq), pages, self._vocab) for seq, pages in zip(plan.forks, plan.fork_tables)
        ]
        loads += [SlotLoad(slot=slot, arrays={}, block=block) for slot, block in plan.blocks]
        processed = tuple(
            Processed(row, seq.slot or 0, seq.computed, row < len(plan.decodes), seq.processors)
            for row, seq in enumerate(sampled)
            if seq.processors is not None
        )
        return packet._replace(
            loads=tuple(load for load in loads if load is not None),
            before=tuple(plan.before),
            after=tuple(plan.after),
            scored=scored_of(plan),
            processed=processed,
        )

    def scratch(self, shape: StepShape, *, longest: int, captured: bool, needs: Needs) -> Packet:
        """Return a step of ``shape`` that nobody asked for: it writes to the scratch page, and no row is sampled.

        Of first chunks, as even as can be, of at most ``longest`` tokens; 0: of sequences that have ended.
        """
        stage, at = self._next(shape)
        tokens, seqs, _ = shape
        self._frame(stage, shape, at, 0 if longest else seqs, 0)
        if longest:
            begin = 0
            for seq in range(seqs):
                count = min(tokens // seqs + (seq < tokens % seqs), longest)
                self._write_chunk(stage, at, seq, begin, 0, count)
                begin += count
        return Packet(stage.data[: at.end], shape, captured, 0, needs, self._turn)

    def _next(self, shape: StepShape) -> tuple[_Stage, Sections]:
        self._turn = (self._turn + 1) % NUM_STAGES
        return self._stages[self._turn], sections(shape)

    def _frame(self, stage: _Stage, shape: StepShape, at: Sections, num_decodes: int, num_rows: int) -> None:
        """Write a step of padding: sequences of nobody, the first ``num_decodes`` of one token each, the rest dead."""
        ints, longs, count = stage.ints, stage.longs, self._count
        tokens, seqs, rows = shape
        ints[Header.NUM_DECODES], ints[Header.NUM_ROWS] = num_decodes, num_rows
        ints[at.slots : at.slots + seqs] = self._nobody
        ints[at.q_starts : at.q_starts + num_decodes + 1] = count[: num_decodes + 1]
        ints[at.q_starts + num_decodes + 1 : at.q_starts + seqs + 1] = num_decodes
        ints[at.kv_lens : at.admission_at] = 0
        ints[at.admission_at : at.admission_at + seqs] = -1
        ints[at.seq_ids : at.seq_ids + num_decodes] = count[:num_decodes]
        if num_decodes < tokens:
            ints[at.seq_ids + num_decodes : at.seq_ids + tokens] = seqs - 1
            longs[at.token_ids // 2 : at.token_ids // 2 + tokens] = 0
            longs[at.positions // 2 : at.positions // 2 + tokens] = -1
        ids = at.logit_rows // 2
        longs[ids : ids + rows] = self._long_count[:rows]
        longs[at.sample_slots // 2 : at.sample_slots // 2 + rows] = self._nobody

    def _write_mixed(self, stage: _Stage, at: Sections, shape: StepShape, plan: Plan) -> None:
        """Write decodes, then chunks."""
        ints, longs = stage.ints, stage.longs
        begin = row = num_decodes = len(plan.decodes)
        rows_at, sample_at = at.logit_rows // 2, at.sample_slots // 2
        forked: list[Any] = []
        slots: list[Any] = [seq.slot for seq in plan.decodes]
        longs[rows_at : rows_at + row] = self._long_count[:row]
        longs[sample_at : sample_at + row] = slots
        for index, chunk in enumerate(plan.chunks, num_decodes):
            slots.append(chunk.sequence.slot)
            self._write_chunk(stage, at, index, begin, chunk.start, chunk.count)
            known = _tokens(chunk)
            longs[at.token_ids // 2 + begin : at.token_ids // 2 + begin + chunk.count] = known
            begin += chunk.count
            if chunk.samples:
                longs[rows_at + row] = begin - 1
                longs[sample_at + row] = slots[-1]
                row += 1
            forked += [(begin - 1, seq.slot) for seq in chunk.forks]
        for at_token, slot in forked:
            longs[rows_at + row], longs[sample_at + row] = at_token, slot
            row += 1
        longs[rows_at + row : rows_at + shape.num_rows] = 0
        ints[at.slots : at.slots + len(slots)] = slots
        ints[at.q_starts + len(slots) : at.q_starts + shape.num_seqs + 1] = begin

    def _write_chunk(self, stage: _Stage, at: Sections, index: int, begin: int, start: int, count: int) -> None:
        """Write where the tokens [start, start + count) of sequence ``index`` stand: at ``begin`` of the batch."""
        ints = stage.ints
        ints[at.q_starts + index] = begin
        ints[at.q_starts + index + 1] = begin + count
        ints[at.kv_lens + index] = start + count
        ints[at.seq_ids + begin : at.seq_ids + begin + count] = index
        positions = at.positions // 2 + begin
        stage.longs[positions : positions + count] = np.arange(start, start + count)

    def _write_news(self, stage: _Stage, at: Sections, plan: Plan) -> int:
        """Write new contents of slots and new pages; return where the packet ends."""
        end, ints = at.end, stage.ints
        if plan.admitted:
            admitted = {id(seq) for seq in plan.admitted}
            for index, chunk in enumerate(plan.chunks, len(plan.decodes)):
                seq = chunk.sequence
                if id(seq) not in admitted:
                    continue
                ints[at.admission_at + index] = end
                stage.longs[end // 2 : end // 2 + SLOT_WIDTH] = admission(seq)
                end += 2 * SLOT_WIDTH
        for row, first, pages in plan.tables:
            end = self._write_pages(ints, at, row, first, pages, end)
        return end

    @staticmethod
    def _write_pages(ints: Ints, at: Sections, index: int, first: int, pages: Rows[Rows[int]], end: int) -> int:
        ints[at.page_first + index] = first
        ints[at.page_count + index] = len(pages[0])
        ints[at.page_at + index] = end
        for group in pages:
            ints[end : end + len(group)] = group
            end += len(group)
        return round_up(end, 2)


def _tokens(chunk: Chunk) -> Ints:
    tokens: array[int] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    return np.frombuffer(tokens, dtype=np.int32)


def admission(seq: Sequence) -> Longs:
    """Return the content of a new sequence's slot, [SLOT_WIDTH]. It becomes active with the last chunk."""
    params, stops = seq.params, seq.stop_ids or (-1,)
    row = np.zeros(SLOT_WIDTH, dtype=np.int64)
    row[Column.POSITION] = len(seq.tokens) - 1
    row[Column.REMAINING] = seq.max_tokens - seq.num_outputs
    row[Column.MIN_LEFT] = params.min_tokens - seq.num_outputs
    row[Column.TOKEN_INDEX] = seq.num_outputs
    row[Column.SEED] = seq.seed
    row[Column.TOP_K] = max(params.top_k, 0)
    floats = row.view(np.float32)
    floats[2 * Column.TEMPERATURE] = params.temperature
    floats[2 * Column.TOP_P] = params.top_p
    floats[2 * Column.MIN_P] = params.min_p
    floats[2 * Column.PRESENCE] = params.presence_penalty
    floats[2 * Column.FREQUENCY] = params.frequency_penalty
    floats[2 * Column.REPETITION] = params.repetition_penalty
    row[Column.NUM_BIASES] = len(params.logit_bias or ())
    row[Column.CONTROLS] = int(seq.controls)
    row[Column.BLOCK] = seq.block_offset
    row[Column.STOPS :] = stops[0]
    row[Column.STOPS : Column.STOPS + len(stops)] = stops
    assert len(stops) <= MAX_STOPS
    return row


def needs_of(sequences: list[Sequence]) -> Needs:
    """Return what the rows need; each sequence's token is already counted as pending."""
    distinct = {seq.needs for seq in sequences}
    logprobs = [each.logprobs for each in distinct if each.logprobs is not None]
    return Needs(
        sampled=any(each.sampled for each in distinct),
        top_k=max((each.top_k for each in distinct), default=0),
        top_p=any(each.top_p for each in distinct),
        min_p=any(each.min_p for each in distinct),
        masked=any(each.masked for each in distinct)
        and any(seq.needs.masked and seq.planned_outputs <= seq.params.min_tokens for seq in sequences),
        adjusted=any(each.adjusted for each in distinct),
        logprobs=max(logprobs, default=None),
        asked=any(each.asked for each in distinct),
    )


def scored_of(plan: Plan) -> Scored | None:
    """Return which tokens of prompts are to be scored, None if there are none."""
    positions, targets, count, begin = list[int](), list[int](), 0, len(plan.decodes)
    for chunk in plan.chunks:
        sequence, wanted = chunk.sequence, chunk.scored
        if wanted:
            positions += range(begin + wanted.start - chunk.start, begin + wanted.stop - chunk.start)
            targets += sequence.tokens[wanted.start + 1 : wanted.stop + 1]
            count = max(count, sequence.params.prompt_logprobs or 0)
        begin += chunk.count
    return Scored(np.array(positions, np.int64), np.array(targets, np.int64), count) if positions else None
