"""The Triton kernels of begin_step and end_step against the references, on packets of random content."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.graph.packet import SLOT_WIDTH, Column, Header, StepShape, packet_capacity, sections
from treadle.graph.state import round_up
from treadle.kernels import begin_step_triton, end_step_triton, registry

SLOTS = 9
"""the last one is nobody's"""


class Step:
    """The tensors of a step: ``decodes`` sequences decode, the others are new or go on; the last is padding."""

    def __init__(self, shape: StepShape, decodes: int, live_rows: int, groups: int, pages: int) -> None:
        self.random = torch.Generator().manual_seed(pages)
        at, tokens, seqs = sections(shape), shape.num_tokens, shape.num_seqs
        self.rows = self.integers(0, 40, SLOTS, SLOT_WIDTH)
        self.rows[:, Column.ACTIVE] = self.integers(0, 2, SLOTS)
        self.rows[:, Column.REMAINING] = self.integers(1, 4, SLOTS)
        self.table = self.integers(0, 1000, SLOTS, groups, pages).int()
        self.packet = torch.zeros(packet_capacity(shape, groups * pages), dtype=torch.int32)
        wide = self.packet.view(torch.int64)
        self.packet[Header.NUM_DECODES], self.packet[Header.NUM_ROWS] = decodes, live_rows
        slots = torch.randperm(SLOTS - 1, generator=self.random)[:seqs]
        slots[-1] = SLOTS - 1
        self.packet[at.slots : at.slots + seqs] = slots
        self.packet[at.admission_at : at.admission_at + seqs] = -1
        wide[at.token_ids // 2 : at.token_ids // 2 + tokens] = self.integers(0, 40, tokens)
        wide[at.positions // 2 : at.positions // 2 + tokens] = self.integers(0, 40, tokens)
        wide[at.sample_slots // 2 : at.sample_slots // 2 + shape.num_rows] = slots[: shape.num_rows]
        end = at.end
        for seq in range(seqs - 1):
            if seq >= decodes and seq % 2:
                self.packet[at.admission_at + seq] = end
                wide[end // 2 : end // 2 + SLOT_WIDTH] = self.integers(0, 40, SLOT_WIDTH)
                end += 2 * SLOT_WIDTH
            first, count = (0, pages) if seq >= decodes else (seq % pages, seq % 2)
            self.packet[at.page_first + seq], self.packet[at.page_count + seq] = first, count
            self.packet[at.page_at + seq] = end
            self.packet[end : end + groups * count] = self.integers(1000, 2000, groups * count).int()
            end += round_up(groups * count, 2)
        self.sampled = self.integers(-1, 40, shape.num_rows)
        self.shape = shape

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def run(self, begin: object, end: object, device: str) -> list[Tensor]:
        """Return everything that both ops change."""
        rows, table, packet = (each.clone().to(device) for each in (self.rows, self.table, self.packet))
        _, groups, pages = self.table.shape
        chosen = torch.full((groups, self.shape.num_seqs + 1, pages), -7, dtype=torch.int32, device=device)
        blocks = torch.full((self.shape.num_seqs + 1,), -7, dtype=torch.int32, device=device)
        out = torch.full((self.shape.num_rows + 1,), -7, device=device)
        begin(rows, table, packet, chosen, blocks, *self.shape)  # type: ignore[operator]
        end(rows, packet, self.sampled.to(device), out, *self.shape)  # type: ignore[operator]
        return [each.cpu() for each in (rows, table, packet, chosen, blocks, out)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "decodes", "live_rows"),
    [
        (StepShape(1, 1, 1), 1, 1),
        (StepShape(8, 8, 8), 8, 5),
        (StepShape(16, 8, 8), 3, 6),
        (StepShape(37, 5, 2), 0, 2),
        (StepShape(9, 5, 0), 4, 0),
    ],
)
@pytest.mark.parametrize(("groups", "pages"), [(1, 1), (1, 7), (3, 5), (1, 1300), (2, 700)])
def test_equal_to_the_references(
    device: str, shape: StepShape, decodes: int, live_rows: int, groups: int, pages: int
) -> None:
    step = Step(shape, decodes, live_rows, groups, pages)
    references = [registry.reference(op).function for op in ("begin_step", "end_step")]
    expected = step.run(*references, "cpu")
    found = step.run(begin_step_triton.begin_step, end_step_triton.end_step, device)
    for mine, theirs in zip(found, expected):
        assert torch.equal(mine, theirs)


def test_compiled_for_sm90_in_one_version_for_all_sizes() -> None:
    made = compile_for_sm90(
        """
from treadle.graph.packet import SLOT_WIDTH, StepShape
from treadle.kernels import begin_step_triton, end_step_triton
rows, packet = torch.zeros(9, SLOT_WIDTH, dtype=torch.int64), torch.zeros(1 << 16, dtype=torch.int32)
table, blocks = torch.zeros(9, 1, 64, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
chosen = torch.zeros(1, 64, 64, dtype=torch.int32)
for shape in (StepShape(1, 1, 1), StepShape(37, 5, 3)):
    for pdl in (False, True):
        begin_step_triton.begin_step(rows, table, packet, chosen, blocks, *shape, pdl=pdl)
        out = torch.zeros(8, dtype=torch.int64)
        end_step_triton.end_step(rows, packet, out, out, *shape, pdl=pdl)
"""
    )
    assert [each["name"] for each in made] == ["_begin", "_end"] * 4
