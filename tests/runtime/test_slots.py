from __future__ import annotations

import torch

from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sampler import Samples
from treadle.runtime.scheduler import Chunk, Plan
from treadle.runtime.sequence import Sequence
from treadle.runtime.slots import Slots, StepPacket, pack


def sequence(name: str, prompt: list[int], slot: int, pages: list[int], **params: object) -> Sequence:
    request = Request(id=name, prompt=prompt, params=SamplingParams(**params), eos_ids=(9,))
    made = Sequence(request, order=0, max_tokens=request.params.max_tokens or 99, seed=5, arrival_s=0.0)
    made.slot, made.pages, made.prefill_end = slot, pages, len(prompt)
    return made


def prefill(slots: Slots, *sequences: Sequence) -> StepPacket:
    """Apply the plan that prefills whole prompts."""
    plan = Plan(admitted=list(sequences))
    for each in sequences:
        each.computed, each.pending = len(each.tokens), 1
        plan.chunks.append(Chunk(sequence=each, start=0, count=each.computed, samples=True))
    packet = pack(plan)
    slots.apply(packet)
    return packet


def decode(*sequences: Sequence) -> StepPacket:
    for each in sequences:
        each.pending += 1
    return pack(Plan(decodes=list(sequences)))


def advance(slots: Slots, packet: StepPacket, *tokens: int) -> None:
    slots.advance(packet.sample_slots, Samples(torch.tensor(tokens)))


def test_decodes_are_fed_from_the_device_beside_chunks_from_the_host() -> None:
    slots = Slots(3, 4, "cpu")
    old = sequence("old", [1, 2, 3], 2, [10, 20])
    advance(slots, prefill(slots, old), 7)
    new = sequence("new", [4, 5, 6, 7, 8], 0, [30, 40, 50])
    new.computed = 4
    old.pending = 2
    old.pages.append(60)
    plan = Plan(
        decodes=[old],
        chunks=[Chunk(sequence=new, start=2, count=2, samples=False)],
        admitted=[new],
        grown=[(old, 2, 60)],
    )
    packet = pack(plan)
    slots.apply(packet)
    inputs = slots.inputs(packet)
    assert inputs.token_ids.tolist() == [7, 6, 7]
    assert inputs.positions.tolist() == [3, 2, 3]
    assert inputs.seq_ids.tolist() == [0, 1, 1]
    assert inputs.q_starts.tolist() == [0, 1, 3]
    assert inputs.kv_lens.tolist() == [4, 4]
    assert inputs.page_table.tolist() == [[10, 20, 60, 0], [30, 40, 50, 0]]
    assert inputs.logit_rows.tolist() == [0]
    assert packet.sample_slots.tolist() == [2]
    assert not slots.active[0]


def test_a_stopped_sequence_is_fed_as_padding() -> None:
    slots = Slots(4, 2, "cpu")
    stops = sequence("stops", [1], 0, [10])
    longest = sequence("longest", [1, 2], 1, [20], max_tokens=1)
    broken = sequence("broken", [1], 2, [30])
    alive = sequence("alive", [1], 3, [40])
    everyone = (stops, longest, broken, alive)
    advance(slots, prefill(slots, *everyone), 9, 5, -1, 6)
    packet = decode(*everyone)
    inputs = slots.inputs(packet)
    assert inputs.positions.tolist() == [-1, -1, -1, 1]
    assert inputs.kv_lens.tolist() == [0, 0, 0, 2]
    # What is sampled from the padding changes nothing.
    advance(slots, packet, 1, 1, 1, 1)
    assert slots.position.tolist() == [1, 2, 1, 2]
    assert slots.active.tolist() == [False, False, False, True]


def test_a_slot_given_to_another_sequence_forgets_the_first() -> None:
    slots = Slots(1, 3, "cpu")
    first = sequence("first", [1], 0, [10, 20, 30], temperature=0.5, top_k=-1)
    advance(slots, prefill(slots, first), 3)
    second = sequence("second", [1, 2, 3], 0, [40], min_tokens=2)
    second.computed = 2
    slots.apply(pack(Plan(admitted=[second], chunks=[Chunk(sequence=second, start=0, count=2, samples=False)])))
    assert not slots.active[0]
    assert slots.page_table.tolist() == [[40, 0, 0]]
    assert (slots.position.item(), slots.remaining.item(), slots.min_left.item()) == (2, 16, 2)
    assert (slots.temperature.item(), slots.top_k.item()) == (1.0, 0)


def test_a_sequence_that_comes_back_goes_on_where_it_was() -> None:
    slots = Slots(1, 3, "cpu")
    back = sequence("back", [1, 2], 0, [10, 20], max_tokens=8, min_tokens=5)
    back.tokens.extend([3, 4, 5])
    prefill(slots, back)
    assert (slots.position.item(), slots.token_index.item()) == (4, 3)
    assert (slots.remaining.item(), slots.min_left.item()) == (5, 2)


def test_needs_are_those_of_the_rows_of_this_step() -> None:
    slots = Slots(3, 2, "cpu")
    greedy = sequence("greedy", [1], 0, [10], temperature=0.0, top_k=5, top_p=0.5)
    hot = sequence("hot", [1], 1, [20], top_k=7, min_p=0.1, logprobs=0)
    late = sequence("late", [1], 2, [30], temperature=0.0, min_tokens=2)
    needs = prefill(slots, greedy).needs
    assert needs == (False, 0, False, False, False, None)
    needs = prefill(slots, greedy, hot, late).needs
    assert needs == (True, 7, False, True, True, 0)
    assert decode(late).needs.masked
    # Two tokens are on their way: the third one may end it.
    assert not decode(late).needs.masked
