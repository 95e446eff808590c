"""What a slot gets beside the packet: all of it follows from the tokens known and the parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.graph.footprint import history_row
from treadle.graph.packet import MAX_BAD_TOKENS, SLOT_WIDTH, control_bytes
from treadle.kernels.adjust_logits import MAX_COUNT, new_controls
from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.processors import RowProcessors
from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sequence import Sequence
from treadle.runtime.slot_load import fork_load, slot_load
from treadle.runtime.slots import Slots

VOCAB = 70


def sequence(out: list[int], words: tuple[tuple[int, ...], ...] = (), **params: object) -> Sequence:
    request = Request(id="r", prompt=[3, 5, 5], params=SamplingParams(**params), bad_token_ids=words)
    made = Sequence(request, order=0, max_tokens=99, seed=0, arrival_s=0.0)
    made.tokens.extend(out)
    made.slot, made.pages = 1, [10, 20]
    return made


def test_a_plain_request_brings_nothing() -> None:
    assert slot_load(sequence([7], temperature=0.5, logprobs=3, min_tokens=2), VOCAB) is None


def test_counts_are_those_of_prompt_and_answer() -> None:
    load = slot_load(sequence([7, 5, 7], repetition_penalty=1.1), VOCAB)
    assert load is not None
    counts = load.arrays["counts"].astype(int)
    assert np.flatnonzero(counts).tolist() == [3, 5, 7]
    assert (counts[[3, 5, 7]] & MAX_COUNT).tolist() == [0, 1, 2]
    assert (counts[[3, 5, 7]] < 0).tolist() == [True, True, False]
    most = slot_load(sequence([7] * (MAX_COUNT + 5), presence_penalty=1.0), VOCAB)
    assert most is not None
    assert most.arrays["counts"][7] == MAX_COUNT


def test_forbidden_tokens_are_bits() -> None:
    load = slot_load(sequence([], words=((33,), (1, 2)), allowed_token_ids=[0, 31, 33, 69]), VOCAB)
    assert load is not None
    bits = np.unpackbits(load.arrays["forbidden"].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [0, 31, 69]
    only = slot_load(sequence([], words=((33,),)), VOCAB)
    assert only is not None
    assert np.flatnonzero(np.unpackbits(only.arrays["forbidden"].view(np.uint8), bitorder="little")).tolist() == [33]


@pytest.mark.parametrize("count", [0, 3, 8, 19])
def test_words_stand_at_the_end_and_recent_tokens_at_their_index(count: int) -> None:
    load = slot_load(sequence(list(range(40, 40 + count)), words=((1, 2), (4, 5, 6), (9,))), VOCAB)
    assert load is not None
    words = load.arrays["words"].tolist()
    assert words[0] == [-1] * 6 + [1, 2]
    assert words[1] == [-1] * 5 + [4, 5, 6]
    assert words[2] == [-1] * 8
    recent = load.arrays["recent"].tolist()
    for index in range(max(0, count - MAX_BAD_TOKENS), count):
        assert recent[index % MAX_BAD_TOKENS] == 40 + index
    assert sum(token >= 0 for token in recent) == min(count, MAX_BAD_TOKENS)


def test_a_slot_takes_in_all_of_it_and_no_other_slot_does() -> None:
    slots = Slots(3, 1, 4, CpuBackend(threads=1), vocab=VOCAB, history_tokens=16)
    made = sequence([7, 5], words=((1, 2),), logit_bias={4: 0.5, 9: -2}, logprob_token_ids=[8, 6], presence_penalty=1)
    made.processors = RowProcessors({})
    row = np.arange(SLOT_WIDTH, dtype=np.int64)
    slots.load(fork_load(made, row, (made.pages,), VOCAB))
    assert slots.rows[1].tolist() == row.tolist()
    assert slots.page_tables[1, 0].tolist() == [10, 20, 0, 0]
    assert slots.history[1, :6].tolist() == [3, 5, 5, 7, 5, 0]
    controls = slots.controls
    assert controls.bias_ids[1, :3].tolist() == [4, 9, 0]
    assert controls.bias_values[1, :3].tolist() == [0.5, -2.0, 0.0]
    assert controls.asked[1, :3].tolist() == [8, 6, 0]
    assert controls.counts[1].count_nonzero() == 3
    for each in (*controls, slots.page_tables, slots.history):
        assert each[[0, 2, 3]].count_nonzero() == 0


@pytest.mark.parametrize("vocab", [1, 70, 4096])
def test_the_memory_plan_counts_every_byte(vocab: int) -> None:
    controls = new_controls(torch.zeros(5, SLOT_WIDTH, dtype=torch.int64), vocab)
    assert sum(each.nbytes for each in controls[1:]) == 5 * control_bytes(vocab)
    slots = Slots(4, 1, 2, CpuBackend(threads=1), vocab=vocab, history_tokens=33)
    assert slots.history.nbytes == history_row(4, 33).nbytes
