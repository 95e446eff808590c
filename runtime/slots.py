"""Batch slots: what the device knows of each running sequence, so that a step needs no answer of the step before.

The host sends differences (``StepPacket``); the tokens of decodes, their positions and whether they still run are
here. All methods of ``Slots`` run on the stream, in launch order.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from treadle.graph.program import StepInputs
from treadle.runtime.sampler import Needs, RowParams, Samples
from treadle.runtime.scheduler import Plan
from treadle.runtime.sequence import Sequence

MAX_STOPS = 32
"""tokens that may end one request, the model's end-of-sequence tokens included"""


class Admissions(NamedTuple):
    """Contents of slots that get a new sequence. Shapes: [A], stops [A, MAX_STOPS]."""

    slots: Tensor
    position: Tensor
    remaining: Tensor
    min_left: Tensor
    token_index: Tensor
    seed: Tensor
    stops: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class StepPacket(NamedTuple):
    """All that the device needs from the host for one step: T tokens of B sequences, of which D decode."""

    admissions: Admissions | None
    page_slots: Tensor
    """[N] int64, with page_index and page_offset: new entries of page tables"""
    page_index: Tensor
    page_offset: Tensor
    starting: Tensor
    """slots whose last chunk this is: they run from now on"""
    num_decodes: int
    slots: Tensor
    """[B] int64, the decodes first"""
    token_ids: Tensor
    """[T - D] int64, of the chunks"""
    positions: Tensor
    """[T - D] int64"""
    kv_lens: Tensor
    """[B - D] int32"""
    seq_ids: Tensor
    q_starts: Tensor
    logit_rows: Tensor
    sample_slots: Tensor
    """[R] int64, the slot of each row of logits"""
    needs: Needs


class Slots:
    """Device arrays over ``num_slots`` sequences; the host never reads them."""

    def __init__(self, num_slots: int, max_pages: int, device: str) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(num_slots, dtype=torch.float32, device=device)

        self.active = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.last_token = integers(num_slots)
        self.position = integers(num_slots)
        """of the last token in its sequence"""
        self.remaining = integers(num_slots)
        """tokens that may still be sampled"""
        self.min_left = integers(num_slots)
        self.token_index = integers(num_slots)
        """of the next generated token"""
        self.seed = integers(num_slots)
        self.stops = integers(num_slots, MAX_STOPS)
        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.top_k = integers(num_slots)
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)

    def apply(self, packet: StepPacket) -> None:
        """Take in the host's differences."""
        new = packet.admissions
        if new is not None:
            at = new.slots
            self.active[at] = False
            # Entries without a page point at the scratch page.
            self.page_table[at] = 0
            self.position[at], self.remaining[at], self.min_left[at] = new.position, new.remaining, new.min_left
            self.token_index[at], self.seed[at], self.stops[at] = new.token_index, new.seed, new.stops
            self.temperature[at], self.top_k[at] = new.temperature, new.top_k
            self.top_p[at], self.min_p[at] = new.top_p, new.min_p
        self.page_table[packet.page_slots, packet.page_index] = packet.page_offset
        self.active[packet.starting] = True

    def inputs(self, packet: StepPacket) -> StepInputs:
        """Return what the program is fed: the decodes from the slots, the chunks from the packet."""
        decodes = packet.slots[: packet.num_decodes]
        active, position = self.active[decodes], self.position[decodes]
        return StepInputs(
            token_ids=torch.cat([self.last_token[decodes], packet.token_ids]),
            positions=torch.cat([torch.where(active, position, -1), packet.positions]),
            seq_ids=packet.seq_ids,
            q_starts=packet.q_starts,
            kv_lens=torch.cat([torch.where(active, position + 1, 0).int(), packet.kv_lens]),
            page_table=self.page_table[packet.slots],
            logit_rows=packet.logit_rows,
        )

    def scratch_inputs(self, num_tokens: int) -> StepInputs:
        """Return a prefill of one sequence all of whose pages are the scratch page."""
        device = self.page_table.device
        positions = torch.arange(num_tokens, device=device)
        return StepInputs(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            seq_ids=torch.zeros_like(positions, dtype=torch.int32),
            q_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
            page_table=torch.zeros_like(self.page_table[:1]),
            logit_rows=positions[-1:],
        )

    def row_params(self, slots: Tensor) -> RowParams:
        """Return the sampling parameters of the rows of logits."""
        return RowParams(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
            token_index=self.token_index[slots],
            min_left=self.min_left[slots],
            stops=self.stops[slots],
        )

    def advance(self, slots: Tensor, samples: Samples) -> None:
        """Note the sampled tokens; a sequence that they end is inactive from the next step on."""
        running, tokens = self.active[slots], samples.tokens
        step = running.long()
        self.last_token[slots] = torch.where(running, tokens.clamp_min(0), self.last_token[slots])
        self.position[slots] += step
        self.token_index[slots] += step
        self.remaining[slots] -= step
        self.min_left[slots] -= step
        # A stop token cannot be drawn while min_tokens forbids it, so that one drawn is one that counts.
        ended = (self.stops[slots] == tokens.unsqueeze(1)).any(dim=1) | (self.remaining[slots] <= 0) | (tokens < 0)
        self.active[slots] = running & ~ended


def pack(plan: Plan) -> StepPacket:
    """Return the packet of a plan, in host memory."""
    chunks, sequences, num_decodes = plan.chunks, plan.sequences, len(plan.decodes)
    lengths = [1] * num_decodes + [chunk.count for chunk in chunks]
    starts = list(accumulate(lengths, initial=0))
    entries = [(seq.slot, i, page) for seq in plan.admitted for i, page in enumerate(seq.pages)]
    entries += [(seq.slot, i, page) for seq, i, page in plan.grown]
    pages = torch.tensor(entries, dtype=torch.int64).view(-1, 3)
    last_rows = [starts[num_decodes + i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
    sampled = plan.sampled
    return StepPacket(
        admissions=_admissions(plan.admitted) if plan.admitted else None,
        page_slots=pages[:, 0],
        page_index=pages[:, 1],
        page_offset=pages[:, 2].int(),
        starting=_integers([chunk.sequence.slot for chunk in chunks if chunk.samples]),
        num_decodes=num_decodes,
        slots=_integers([seq.slot for seq in sequences]),
        token_ids=_joined([_known(chunk.sequence, chunk.start, chunk.count) for chunk in chunks]),
        positions=_joined([torch.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]),
        kv_lens=torch.tensor([chunk.start + chunk.count for chunk in chunks], dtype=torch.int32),
        seq_ids=torch.arange(len(sequences), dtype=torch.int32).repeat_interleave(_integers(lengths)),
        q_starts=torch.tensor(starts, dtype=torch.int32),
        logit_rows=_integers([*range(num_decodes), *last_rows]),
        sample_slots=_integers([seq.slot for seq in sampled]),
        needs=_needs(sampled),
    )


def _integers(values: list[int] | list[int | None]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _known(sequence: Sequence, start: int, count: int) -> Tensor:
    return torch.frombuffer(sequence.tokens[start : start + count], dtype=torch.int32).long()


def _admissions(sequences: list[Sequence]) -> Admissions:
    params = [seq.params for seq in sequences]
    stops = [seq.stop_ids or (-1,) for seq in sequences]
    return Admissions(
        slots=_integers([seq.slot for seq in sequences]),
        position=_integers([len(seq.tokens) - 1 for seq in sequences]),
        remaining=_integers([seq.max_tokens - seq.num_outputs for seq in sequences]),
        min_left=_integers([each.min_tokens - seq.num_outputs for each, seq in zip(params, sequences)]),
        token_index=_integers([seq.num_outputs for seq in sequences]),
        seed=_integers([seq.seed for seq in sequences]),
        stops=torch.tensor([ids + ids[:1] * (MAX_STOPS - len(ids)) for ids in stops]),
        temperature=torch.tensor([each.temperature for each in params]),
        top_k=_integers([max(each.top_k, 0) for each in params]),
        top_p=torch.tensor([each.top_p for each in params]),
        min_p=torch.tensor([each.min_p for each in params]),
    )


def _needs(sequences: list[Sequence]) -> Needs:
    """Return what the rows need; each sequence's token is already counted as pending."""
    params = [seq.params for seq in sequences]
    hot = [each for each in params if each.temperature > 0]
    logprobs = [each.logprobs for each in params if each.logprobs is not None]
    return Needs(
        sampled=bool(hot),
        top_k=max((each.top_k for each in hot), default=0),
        top_p=any(each.top_p < 1 for each in hot),
        min_p=any(each.min_p > 0 for each in hot),
        masked=any(seq.stop_ids and seq.planned_outputs <= seq.params.min_tokens for seq in sequences),
        logprobs=max(logprobs, default=None),
    )
