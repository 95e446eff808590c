"""A plan becomes a packet, and a packet becomes what the program is fed: through the slots, whatever the padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treadle.graph.buckets import Buckets
from treadle.graph.packet import Column, Header, StepShape, sections
from treadle.graph.program import StepInputs
from treadle.kernels import registry
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.packet import NUM_STAGES, Packet, PacketWriter
from treadle.runtime.plan import Chunk, Plan
from treadle.runtime.request import MAX_LOGPROBS, Request, SamplingParams
from treadle.runtime.sampler import VARIANTS, variant
from treadle.runtime.sequence import Needs, Sequence
from treadle.runtime.slots import Slots

registry.load_all()

NUM_SLOTS, MAX_PAGES, VOCAB = 4, 4, 40
BUCKETS = Buckets([StepShape(4, 4, 4)], [StepShape(16, 4, 4)])


def sequence(name: str, prompt: list[int], slot: int, pages: list[int], **params: object) -> Sequence:
    request = Request(id=name, prompt=prompt, params=SamplingParams(**params), eos_ids=(9,))
    made = Sequence(request, order=0, max_tokens=request.params.max_tokens or 99, seed=5, arrival_s=0.0)
    made.slot, made.pages, made.prefill_end = slot, pages, len(prompt)
    return made


class Device:
    """Does to a packet what the stepper does around the program; ``padded``: to buckets."""

    def __init__(self, padded: bool, groups: int = 1) -> None:
        self.slots = Slots(NUM_SLOTS, groups, MAX_PAGES, CpuBackend(threads=1), vocab=VOCAB)
        buckets = BUCKETS if padded else Buckets()
        largest = StepShape(32, NUM_SLOTS, NUM_SLOTS)
        self.writer = PacketWriter(
            CpuBackend(threads=1), buckets, largest, max_pages=groups * MAX_PAGES, nobody=self.slots.nobody, vocab=VOCAB
        )
        self.memory = torch.zeros(self.writer.capacity, dtype=torch.int32)
        self.page_tables = torch.zeros(groups, NUM_SLOTS, MAX_PAGES, dtype=torch.int32)
        self.blocks = torch.zeros(NUM_SLOTS, dtype=torch.int32)
        self.packet: Packet | None = None

    def begin(self, plan: Plan) -> StepInputs:
        """Send a plan and return the live part of the step; what is behind it is checked to be padding."""
        for each in plan.sampled:
            each.pending += 1
        packet = self.packet = self.writer.write(plan)
        self.memory[: len(packet.data)] = packet.data
        torch.ops.treadle.begin_step(
            self.slots.rows, self.slots.page_tables, self.memory, self.page_tables, self.blocks, *packet.shape
        )
        at, wide = sections(packet.shape), self.memory.view(torch.int64)
        tokens, seqs, rows = packet.shape
        live, live_seqs = plan.num_tokens, len(plan.sequences)

        def part(memory: Tensor, begin: int, size: int) -> Tensor:
            return memory[begin : begin + size].clone()

        positions = part(wide, at.positions // 2, tokens)
        kv_lens = part(self.memory, at.kv_lens, seqs)
        q_starts = part(self.memory, at.q_starts, seqs + 1)
        logit_rows = part(wide, at.logit_rows // 2, rows)
        assert set(positions[live:].tolist()) <= {-1}
        assert set(kv_lens[live_seqs:].tolist()) <= {0}
        assert q_starts.diff().ge(0).all()
        assert q_starts[-1] <= tokens
        assert logit_rows.ge(0).all()
        assert logit_rows.lt(tokens).all()
        seq_ids = part(self.memory, at.seq_ids, tokens)
        assert seq_ids.ge(0).all()
        assert seq_ids.lt(seqs).all()
        return StepInputs(
            token_ids=part(wide, at.token_ids // 2, live),
            positions=positions[:live],
            seq_ids=seq_ids[:live],
            q_starts=q_starts[: live_seqs + 1],
            kv_lens=kv_lens[:live_seqs],
            page_tables=self.page_tables[:, :live_seqs].clone(),
            blocks=self.blocks[:live_seqs].clone(),
            logit_rows=logit_rows[: packet.num_rows],
        )

    def end(self, *tokens: int) -> list[int]:
        """Give each row of the last step a token; return what the host gets."""
        assert self.packet is not None
        assert len(tokens) == self.packet.num_rows
        rows = self.packet.shape.num_rows
        sampled = torch.tensor([*tokens, *[3] * (rows - len(tokens))])
        out = torch.full((rows,), -7)
        torch.ops.treadle.end_step(self.slots.rows, self.memory, sampled, out, *self.packet.shape)
        assert set(out[len(tokens) :].tolist()) <= {-7}
        assert not self.slots.column(Column.ACTIVE)[self.slots.nobody]
        return out[: len(tokens)].tolist()

    def column(self, column: Column) -> list[int]:
        return self.slots.column(column)[:NUM_SLOTS].tolist()


@pytest.fixture(params=[False, True], ids=["exact", "padded"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


def prefill(*sequences: Sequence) -> Plan:
    """Return the plan that prefills whole prompts."""
    plan = Plan(admitted=list(sequences))
    for row, each in enumerate(sequences):
        each.computed = len(each.tokens)
        plan.tables.append((row, 0, (each.pages,)))
        plan.chunks.append(Chunk(sequence=each, start=0, count=each.computed, samples=True))
    return plan


def test_decodes_are_fed_from_the_device_beside_chunks_from_the_host(device: Device) -> None:
    old = sequence("old", [1, 2, 3], 2, [10, 20])
    device.begin(prefill(old))
    assert device.end(7) == [7]
    new = sequence("new", [4, 5, 6, 7, 8], 0, [30, 40, 50])
    new.computed = 4
    plan = Plan(
        decodes=[old],
        chunks=[Chunk(sequence=new, start=2, count=2, samples=False)],
        admitted=[new],
        tables=[(0, 2, [[60]]), (1, 0, [new.pages])],
    )
    inputs = device.begin(plan)
    assert inputs.token_ids.tolist() == [7, 6, 7]
    assert inputs.positions.tolist() == [3, 2, 3]
    assert inputs.seq_ids.tolist() == [0, 1, 1]
    assert inputs.q_starts.tolist() == [0, 1, 3]
    assert inputs.kv_lens.tolist() == [4, 4]
    assert inputs.page_tables[0].tolist() == [[10, 20, 60, 0], [30, 40, 50, 0]]
    assert inputs.logit_rows.tolist() == [0]
    assert device.end(8) == [8]
    assert device.column(Column.ACTIVE) == [0, 0, 1, 0]
    last = device.begin(Plan(decodes=[old], chunks=[Chunk(sequence=new, start=4, count=1, samples=True)]))
    assert last.token_ids.tolist() == [8, 8]
    assert last.page_tables[0].tolist() == [[10, 20, 60, 0], [30, 40, 50, 0]]
    assert last.logit_rows.tolist() == [0, 1]
    device.end(5, 6)
    assert device.column(Column.ACTIVE) == [1, 0, 1, 0]
    both = device.begin(Plan(decodes=[new, old]))
    assert (both.token_ids.tolist(), both.positions.tolist()) == ([6, 5], [5, 5])


def test_a_stopped_sequence_is_fed_as_padding(device: Device) -> None:
    stops = sequence("stops", [1], 0, [10])
    longest = sequence("longest", [1, 2], 1, [20], max_tokens=1)
    broken = sequence("broken", [1], 2, [30])
    alive = sequence("alive", [1], 3, [40])
    everyone = (stops, longest, broken, alive)
    device.begin(prefill(*everyone))
    device.end(9, 5, -1, 6)
    inputs = device.begin(Plan(decodes=list(everyone)))
    assert inputs.positions.tolist() == [-1, -1, -1, 1]
    assert inputs.kv_lens.tolist() == [0, 0, 0, 2]
    # What is sampled from the padding changes nothing.
    device.end(1, 1, 1, 1)
    assert device.column(Column.POSITION) == [1, 2, 1, 2]
    assert device.column(Column.ACTIVE) == [0, 0, 0, 1]
    assert device.column(Column.LAST_TOKEN) == [9, 5, 0, 1]


def test_a_slot_given_to_another_sequence_forgets_the_first(device: Device) -> None:
    first = sequence("first", [1], 0, [10, 20, 30], temperature=0.5, top_k=-1)
    device.begin(prefill(first))
    device.end(3)
    second = sequence("second", [1, 2, 3], 0, [40], min_tokens=2, top_p=0.25, min_p=0.125)
    second.computed = 2
    chunk = Chunk(sequence=second, start=0, count=2, samples=False)
    inputs = device.begin(Plan(admitted=[second], chunks=[chunk], tables=[(0, 0, [[40]])]))
    assert inputs.page_tables[0, 0, 0] == 40
    device.end()
    assert not device.column(Column.ACTIVE)[0]
    params = device.slots.row_params(torch.tensor([0]))
    assert (params.temperature.item(), params.top_k.item(), params.min_left.item()) == (1.0, 0, 2)
    assert (params.top_p.item(), params.min_p.item(), params.seed.item()) == (0.25, 0.125, 5)
    assert params.stops.unique().tolist() == [9]
    assert (device.column(Column.POSITION)[0], device.column(Column.REMAINING)[0]) == (2, 16)


def test_a_sequence_that_comes_back_goes_on_where_it_was(device: Device) -> None:
    back = sequence("back", [1, 2], 0, [10, 20], max_tokens=8, min_tokens=5)
    back.tokens.extend([3, 4, 5])
    device.begin(prefill(back))
    assert (device.column(Column.POSITION)[0], device.column(Column.TOKEN_INDEX)[0]) == (4, 3)
    assert (device.column(Column.REMAINING)[0], device.column(Column.MIN_LEFT)[0]) == (5, 2)


def test_every_slot_new_with_all_its_pages_fits_a_packet(device: Device) -> None:
    pages = [[10 * slot + page for page in range(MAX_PAGES)] for slot in range(NUM_SLOTS)]
    inputs = device.begin(prefill(*(sequence(str(slot), [1] * 8, slot, pages[slot]) for slot in range(NUM_SLOTS))))
    assert inputs.page_tables[0].tolist() == pages
    device.end(*range(NUM_SLOTS))


@pytest.mark.parametrize(
    ("longest", "shape", "lengths"),
    [(0, StepShape(4, 4, 4), [1] * 4), (6, StepShape(16, 3, 3), [6, 5, 5]), (4, StepShape(16, 3, 3), [4] * 3)],
)
def test_a_scratch_step_belongs_to_nobody(device: Device, longest: int, shape: StepShape, lengths: list[int]) -> None:
    packet = device.writer.scratch(shape, longest=longest, captured=False, needs=Needs())
    at, data = sections(shape), packet.data
    assert data[Header.NUM_ROWS] == packet.num_rows == 0
    assert set(data[at.slots : at.slots + shape.num_seqs].tolist()) == {device.slots.nobody}
    assert data[at.q_starts : at.q_starts + shape.num_seqs + 1].diff().tolist() == lengths
    if longest:
        positions = [position for length in lengths for position in range(length)]
        padding = [-1] * (shape.num_tokens - len(positions))
        assert data[at.positions : at.positions + 32].view(torch.int64).tolist() == positions + padding


def test_a_packet_stays_while_the_next_ones_are_written() -> None:
    device = Device(padded=True)
    first = device.writer.write(prefill(sequence("a", [1, 2], 0, [10])))
    kept = first.data.clone()
    for _ in range(NUM_STAGES - 1):
        device.writer.write(prefill(sequence("b", [3, 4, 5], 1, [20])))
    assert torch.equal(first.data, kept)


def test_needs_are_those_of_the_rows_of_this_step(device: Device) -> None:
    greedy = sequence("greedy", [1], 0, [10], temperature=0.0, top_k=5, top_p=0.5)
    hot = sequence("hot", [1], 1, [20], top_k=7, min_p=0.1, logprobs=0)
    late = sequence("late", [1], 2, [30], temperature=0.0, min_tokens=2)

    def needs(plan: Plan) -> Needs:
        device.begin(plan)
        assert device.packet is not None
        return device.packet.needs

    assert needs(prefill(greedy)) == Needs()
    greedy.pending = 0
    assert needs(prefill(greedy, hot, late)) == Needs(sampled=True, top_k=7, min_p=True, masked=True, logprobs=0)
    assert needs(Plan(decodes=[late])).masked
    # Two tokens are on their way: the third one may end it.
    assert not needs(Plan(decodes=[late])).masked


def test_a_captured_variant_serves_whatever_needs_less() -> None:
    greedy, sampled, adjusted, full = VARIANTS
    assert VARIANTS[variant(Needs())] is greedy
    assert VARIANTS[variant(Needs(masked=True))] is sampled
    assert VARIANTS[variant(Needs(sampled=True, top_k=4))] is sampled
    assert VARIANTS[variant(Needs(logprobs=0))] is full
    assert VARIANTS[variant(Needs(adjusted=True))] is adjusted
    assert VARIANTS[variant(Needs(adjusted=True, logprobs=0, asked=True))] is full
    assert full.logprobs == MAX_LOGPROBS
    assert full.asked
    assert adjusted.logprobs is None
    assert all(each.masked and each.sampled for each in (sampled, adjusted, full))
    assert all(each.adjusted for each in (adjusted, full))


@pytest.mark.parametrize("padded", [False, True])
def test_each_group_of_states_has_a_table_of_its_own_and_each_sequence_a_block(padded: bool) -> None:
    device = Device(padded, groups=2)
    first, second = sequence("first", [1, 2, 3], 2, []), sequence("second", [4, 5], 0, [])
    first.block_offset, second.block_offset = 700, 900
    plan = prefill(first, second)
    plan.tables = [(0, 0, [[10, 20], [110, 120]]), (1, 0, [[30], [130]])]
    inputs = device.begin(plan)
    assert inputs.page_tables.tolist() == [[[10, 20, 0, 0], [30, 0, 0, 0]], [[110, 120, 0, 0], [130, 0, 0, 0]]]
    assert inputs.blocks.tolist() == [700, 900]
    device.end(7, 8)
    grown = Plan(decodes=[second, first], tables=[(1, 2, [[40], [140]])], blocks=[(0, 950)])
    inputs = device.begin(grown)
    assert inputs.page_tables.tolist() == [[[30, 0, 0, 0], [10, 20, 40, 0]], [[130, 0, 0, 0], [110, 120, 140, 0]]]
    assert device.packet is not None
    assert [(load.slot, load.block) for load in device.packet.loads] == [(0, 950)]
    device.slots.load(device.packet.loads[0])
    assert device.column(Column.BLOCK) == [950, 0, 700, 0]
