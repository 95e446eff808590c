"""The kernels that adjust logits against the plain account of the reference."""

from __future__ import annotations

import pytest
import torch
from controls import random_controls
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import adjust_logits_triton
from treadle.kernels.adjust_logits import Controls, adjust_logits, note_tokens


def on(device: str, controls: Controls) -> Controls:
    return Controls(*(each.clone().to(device) for each in controls))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "count"), [(1, 3), (70, 8), (5001, 5), (700, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_the_reference(device: str, vocab: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    controls = random_controls(9, vocab, generator)
    logits = (torch.randn(count, vocab + 3, generator=generator) * 4).to(dtype)[:, :vocab]
    slots = torch.randperm(9, generator=generator)[:count]
    found = adjust_logits_triton.adjust_logits(logits.to(device), slots.to(device), on(device, controls)).cpu()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, adjust_logits(logits, slots, controls), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_noted_as_the_reference_notes_them(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    expected = random_controls(9, 300, generator)
    expected.counts[:, :3] = 0x7FFF
    expected.counts[:, 3:6] = -1
    found = on(device, expected)
    slots = torch.randperm(9, generator=generator)
    for low, high in ((-1, 6), (0, 300), (0, 300)):
        tokens = torch.randint(low, high, (9,), generator=generator)
        note_tokens(tokens, slots, expected)
        adjust_logits_triton.note_tokens(tokens.to(device), slots.to(device), found)
    for mine, theirs in zip(found, expected):
        assert torch.equal(mine.cpu(), theirs)


def test_it_compiles_for_sm90() -> None:
    compiled = compile_for_sm90("""
from treadle.graph.packet import SLOT_WIDTH
from treadle.kernels import adjust_logits_triton
from treadle.kernels.adjust_logits import new_controls
controls = new_controls(torch.zeros(5, SLOT_WIDTH, dtype=torch.int64), 151936)
slots = torch.zeros(4, dtype=torch.int64)
for dtype in (torch.bfloat16, torch.float32):
    adjust_logits_triton.adjust_logits(torch.zeros(4, 151936, dtype=dtype), slots, controls)
adjust_logits_triton.note_tokens(slots, slots, controls)
""")
    assert [each["name"] for each in compiled] == ["_dense", "_sparse", "_dense", "_sparse", "_note"]
