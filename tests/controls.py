"""Slots of requests that change their logits in every way at once, at random."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, SLOT_WIDTH, Column
from treadle.kernels.adjust_logits import MAX_COUNT, Controls, new_controls


def random_controls(slots: int, vocab: int, generator: torch.Generator) -> Controls:
    """Return the arrays of so many slots; the last one asks for nothing."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    controls = new_controls(torch.zeros(slots, SLOT_WIDTH, dtype=torch.int64), vocab)
    rows, reals = controls.rows, controls.rows.view(torch.float32)
    rows[:, Column.CONTROLS] = integers(0, 8, slots)
    rows[0, Column.CONTROLS] = 7
    rows[:, Column.NUM_BIASES] = integers(0, min(vocab, 40), slots)
    rows[:, Column.TOKEN_INDEX] = integers(0, 30, slots)
    for column, low, high in ((Column.PRESENCE, -2, 4), (Column.FREQUENCY, -2, 4), (Column.REPETITION, 0.5, 1)):
        reals[:, 2 * column] = torch.rand(slots, generator=generator) * high + low
    seen = torch.rand(slots, vocab, generator=generator)
    controls.counts.copy_(torch.where(seen < 0.3, integers(1, 5, slots, vocab), 0))
    controls.counts[seen > 0.8] -= MAX_COUNT + 1
    controls.forbidden.copy_(integers(-(2**31), 2**31, *controls.forbidden.shape) & integers(0, 2**31, 1))
    for slot in range(slots):
        controls.bias_ids[slot, : min(vocab, MAX_BIASES)] = torch.randperm(vocab, generator=generator)[:MAX_BIASES]
    controls.bias_values.copy_(torch.randn(slots, MAX_BIASES, generator=generator) * 5)
    controls.recent.copy_(integers(0, 3, slots, MAX_BAD_TOKENS))
    controls.words.fill_(-1)
    for slot in range(slots):
        for word in range(MAX_BAD_WORDS // 2):
            length = int(integers(1, MAX_BAD_TOKENS + 1, 1)) if word % 2 else 2
            controls.words[slot, word, -length:] = integers(0, min(vocab, 4), length).int()
    rows[-1, Column.CONTROLS] = rows[-1, Column.NUM_BIASES] = 0
    return controls
