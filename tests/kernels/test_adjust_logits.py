"""What a request makes of its logits, against a plain account of every token."""

from __future__ import annotations

import pytest
import torch
from controls import random_controls
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from treadle.graph.packet import MAX_BAD_TOKENS, SLOT_WIDTH, Column, Control
from treadle.kernels.adjust_logits import MAX_COUNT, Controls, adjust_logits, new_controls, note_tokens

VOCAB = 70


def plain(logits: Tensor, slot: int, controls: Controls) -> list[float]:
    """Return a row of ``adjust_logits``, one token at a time."""
    state, reals = controls.rows[slot].tolist(), controls.rows[slot].view(torch.float32).tolist()
    flags, biases = state[Column.CONTROLS], state[Column.NUM_BIASES]
    index = state[Column.TOKEN_INDEX]
    generated = [
        int(controls.recent[slot, i % MAX_BAD_TOKENS]) for i in range(max(0, index - MAX_BAD_TOKENS + 1), index)
    ]
    bias = dict(zip(controls.bias_ids[slot, :biases].tolist(), controls.bias_values[slot, :biases].tolist()))
    found = []
    for token, value in enumerate(logits.float().tolist()):
        if flags & Control.FORBIDDEN and int(controls.forbidden[slot, token // 32]) >> token % 32 & 1:
            value = -float("inf")
        value += bias.get(token, 0.0)
        if flags & Control.WORDS:
            for row in controls.words[slot].tolist():
                word = [each for each in row if each >= 0]
                prefix = word[:-1]
                if word and word[-1] == token and generated[len(generated) - len(prefix) :] == prefix:
                    value = -float("inf")
        if flags & Control.PENALTIES:
            presence, frequency, repetition = (
                reals[2 * column] for column in (Column.PRESENCE, Column.FREQUENCY, Column.REPETITION)
            )
            entry = int(controls.counts[slot, token])
            number = entry & MAX_COUNT
            if entry:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * number + presence * (number > 0)
        found.append(value)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_accounted_for(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    controls = random_controls(9, VOCAB, generator)
    logits = torch.randn(7, VOCAB, generator=generator) * 4
    slots = torch.randperm(8, generator=generator)[:7]
    kept = logits.clone()
    found = adjust_logits(logits, slots, controls)
    expected = torch.tensor([plain(row, slot, controls) for row, slot in zip(logits, slots.tolist())])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits, kept)
    assert (found == -torch.inf).any()


def test_repetition_is_transformers() -> None:
    controls = new_controls(torch.zeros(2, SLOT_WIDTH, dtype=torch.int64), VOCAB)
    prompt, answer = [3, 5, 5, 9], [7, 7, 3]
    controls.rows[0, Column.CONTROLS] = int(Control.PENALTIES)
    controls.rows.view(torch.float32)[0, 2 * Column.REPETITION] = 1.3
    controls.counts[0, prompt] = -(MAX_COUNT + 1)
    for token in answer:
        note_tokens(torch.tensor([token]), torch.tensor([0]), controls)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + answer]), logits)
    torch.testing.assert_close(adjust_logits(logits, torch.tensor([0]), controls), expected)


def test_counts_follow_the_answer_and_stay_at_their_largest() -> None:
    controls = new_controls(torch.zeros(3, SLOT_WIDTH, dtype=torch.int64), VOCAB)
    controls.rows[:2, Column.CONTROLS] = torch.tensor([int(Control.PENALTIES), int(Control.WORDS)])
    controls.counts[0, 4], controls.counts[0, 5] = MAX_COUNT, -1
    controls.rows[1, Column.TOKEN_INDEX] = 2 * MAX_BAD_TOKENS + 3
    for token in (4, 5, 6, 6, -1):
        note_tokens(torch.tensor([token, 9, 1]), torch.tensor([0, 1, 2]), controls)
    assert controls.counts[0, 4:7].tolist() == [MAX_COUNT, -1, 2]
    assert controls.counts[1:].count_nonzero() == 0
    assert controls.recent[1].tolist() == [0, 0, 0, 9, 0, 0, 0, 0]
    assert controls.recent[[0, 2]].count_nonzero() == 0


def test_nothing_asked_changes_nothing_whatever_the_arrays_hold() -> None:
    generator = torch.Generator().manual_seed(1)
    controls = random_controls(3, VOCAB, generator)
    controls.rows[:, Column.CONTROLS] = controls.rows[:, Column.NUM_BIASES] = 0
    logits = torch.randn(3, VOCAB, generator=generator)
    assert torch.equal(adjust_logits(logits, torch.arange(3), controls), logits)
