"""What requests change about logits before a token is drawn: forbidden tokens, biases, bad words and penalties.

In this order, as vLLM's. A slot's arrays say what its request asks for; its counts and its last tokens follow the
answer on the device (``note_tokens``), so that nothing of it waits for the host. A slot whose ``Column.CONTROLS`` and
``Column.NUM_BIASES`` are 0 changes nothing, whatever its arrays hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treadle.graph.packet import MAX_ASKED, MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, SLOT_WIDTH, Column, Control

MAX_COUNT = 0x7FFF
"""a count stays here; the sign of a count says that the prompt holds the token"""


class Controls(NamedTuple):
    """Arrays over S slots and V tokens; ``rows`` are the slots' own."""

    rows: Tensor
    """[S, SLOT_WIDTH] int64"""
    counts: Tensor
    """[S, V] int16: how often the answer holds a token, negative (the sign bit alone) if the prompt does"""
    forbidden: Tensor
    """[S, ceil(V / 32)] int32: token 32 i + b is bit b of word i"""
    bias_ids: Tensor
    """[S, MAX_BIASES] int32"""
    bias_values: Tensor
    """[S, MAX_BIASES] float32"""
    words: Tensor
    """[S, MAX_BAD_WORDS, MAX_BAD_TOKENS] int32, each word at the end of its row, -1 before it and in rows of none"""
    recent: Tensor
    """[S, MAX_BAD_TOKENS] int32: token i of the answer at i modulo MAX_BAD_TOKENS"""
    asked: Tensor
    """[S, MAX_ASKED] int32, tokens whose log-probabilities are given, 0 as padding"""


def new_controls(rows: Tensor, vocab: int) -> Controls:
    """Return arrays for the slots of ``rows`` [S, SLOT_WIDTH], on their device."""
    count = rows.shape[0]
    assert rows.shape[1] == SLOT_WIDTH, "rows are those of slots"

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=rows.device)

    return Controls(
        rows=rows,
        counts=zeros(vocab, dtype=torch.int16),
        forbidden=zeros(-(-vocab // 32)),
        bias_ids=zeros(MAX_BIASES),
        bias_values=zeros(MAX_BIASES, dtype=torch.float32),
        words=zeros(MAX_BAD_WORDS, MAX_BAD_TOKENS),
        recent=zeros(MAX_BAD_TOKENS),
        asked=zeros(MAX_ASKED),
    )


def adjust_logits(logits: Tensor, slots: Tensor, controls: Controls) -> Tensor:
    """Return what the requests of ``slots`` [R] make of their ``logits`` [R, V]: float32 [R, V]. The logits stay."""
    adjusted = logits.to(torch.float32, copy=True)
    for row, slot in enumerate(slots.tolist()):
        state, line = controls.rows[slot], adjusted[row]
        flags, biases = int(state[Column.CONTROLS]), int(state[Column.NUM_BIASES])
        if flags & Control.FORBIDDEN:
            bits = controls.forbidden[slot].unsqueeze(1) >> torch.arange(32, device=logits.device) & 1
            line.masked_fill_(bits.flatten()[: len(line)].bool(), -torch.inf)
        if biases:
            line[controls.bias_ids[slot, :biases].long()] += controls.bias_values[slot, :biases]
        if flags & Control.WORDS:
            line[_completions(controls, slot, int(state[Column.TOKEN_INDEX]))] = -torch.inf
        if flags & Control.PENALTIES:
            values = state.view(torch.float32)
            presence, frequency, repetition = (
                values[2 * column] for column in (Column.PRESENCE, Column.FREQUENCY, Column.REPETITION)
            )
            counts = controls.counts[slot]
            repeated = torch.where(line > 0, line / repetition, line * repetition)
            number = (counts & MAX_COUNT).float()
            line.copy_(torch.where(counts != 0, repeated, line) - frequency * number - presence * (number > 0))
    return adjusted


def note_tokens(tokens: Tensor, slots: Tensor, controls: Controls) -> None:
    """Count ``tokens`` [R] in the answers of ``slots`` [R], before their token index grows; -1 is no token."""
    flags = controls.rows[slots, Column.CONTROLS]
    for control in (Control.PENALTIES, Control.WORDS):
        rows = ((flags & control != 0) & (tokens >= 0)).nonzero().squeeze(1)
        if not len(rows):
            continue
        slot, token = slots[rows], tokens[rows]
        if control is Control.PENALTIES:
            counts = controls.counts[slot, token]
            controls.counts[slot, token] = torch.where(counts & MAX_COUNT < MAX_COUNT, counts + 1, counts)
        else:
            index = controls.rows[slot, Column.TOKEN_INDEX] % MAX_BAD_TOKENS
            controls.recent[slot, index] = token.int()


def _completions(controls: Controls, slot: int, token_index: int) -> Tensor:
    """Return the tokens that would complete a bad word now."""
    back = torch.arange(MAX_BAD_TOKENS - 1, 0, -1, device=controls.recent.device)
    before = controls.recent[slot][(token_index - back) % MAX_BAD_TOKENS]
    before = torch.where(back <= token_index, before, -2)
    words = controls.words[slot]
    complete = ((words[:, :-1] == -1) | (words[:, :-1] == before)).all(dim=1) & (words[:, -1] >= 0)
    return words[complete, -1].long()
