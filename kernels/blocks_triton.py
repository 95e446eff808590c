"""What the Triton kernels of ops with a block state share: where a state lies, and which tokens are whose.

A step's sequences are found on the device, on grids that follow from the numbers of its tokens and its sequences alone,
so that a captured step serves any lengths. Sequences are looked through SEQUENCES at a time by every program.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

SEQUENCES = tl.constexpr(128)
"""Sequences that a program looks at together."""
LEAST_DECAY = tl.constexpr(-100.0)
"""Logarithms of decays below it are taken for it: e^-100 is below every normal fp32, and differences stay finite."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E). Of the two only exp2 is one instruction: exp takes care of results that are not normal."""

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def element(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which products of ``dtype`` are made; the interpreter computes in fp32 alone."""
    return tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[dtype]


def precision(dtype: torch.dtype) -> str:
    """Return how products of fp32 are made in a model of ``dtype``."""
    return "ieee" if dtype is torch.float32 else "tf32"


def arena(memory: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bytes of an arena as elements of ``dtype``."""
    assert memory.dim() == 1, "kernels take states from an arena"
    return memory.view(dtype)


def at_most(tokens: int, sequences: int, chunk: int) -> int:
    """Return how many chunks of ``chunk`` tokens a step can have."""
    return min(tokens // chunk + sequences, tokens)


@functools.cache
def _processors(device: torch.device) -> int:
    # The interpreter runs programs one after the other: few, so that they take turns.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def turns(most: int, each: int, device: torch.device) -> int:
    """Return how many of ``most`` items have programs of their own, ``each`` an item; the others take turns with them.

    Most of what there could be is not there, and programs that find nothing to do take time too.
    """
    return max(min(most, -(-2 * _processors(device) // each)), 1)


@triton.jit
def state_at(memory, blocks, offset, sequence, ITEM: tl.constexpr):
    """Return where the part of a sequence begins; ``memory`` has elements of ITEM bytes."""
    begin = tl.load(blocks + sequence).to(tl.int64) * (256 // ITEM) + tl.load(offset) // ITEM
    return memory + tl.multiple_of(begin, 256 // ITEM)


@triton.jit
def rows_of(sequence, q_starts, positions, kv_lens, num_rows, num_seqs):
    """Return (first row, row behind the last, whether the sequence lives, whether it has a state).

    The rows past the last sequence form one more, which is dead.
    """
    first = tl.load(q_starts + sequence)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    live = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0) > 0
    old = tl.load(positions + first, mask=first < end, other=0) != 0
    return first, end, live & (first < end), old


@triton.jit
def find_chunk(
    item, q_starts, kv_lens, num_rows, num_seqs, LEAST: tl.constexpr, CHUNK: tl.constexpr, DEAD: tl.constexpr
):  # fmt: skip
    """Return (sequence, number of a chunk of CHUNK tokens in it) of an item of work, and how many items there are.

    Live sequences of LEAST tokens or more have chunks; with DEAD the others too, and the rows past the last sequence.
    The sequence is num_seqs + DEAD if there are not so many items.
    """
    num = num_seqs + DEAD
    sequence, first, items = 0, 0, 0
    for start in range(0, num, SEQUENCES):
        one = start + tl.arange(0, SEQUENCES)
        begin = tl.load(q_starts + one, mask=one <= num_seqs, other=0)
        end = tl.load(q_starts + one + 1, mask=one < num_seqs, other=num_rows)
        there = one < num
        count = end - begin
        if not DEAD:
            alive = tl.load(kv_lens + one, mask=one < num_seqs, other=0) > 0
            there = there & alive & (count >= LEAST)
        upto = tl.cumsum(tl.where(there, tl.cdiv(count, CHUNK), 0), 0) + items
        before = (upto <= item) & (one < num)
        sequence += tl.sum(before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(before, upto, 0), 0))
        items = tl.max(upto, 0)
    return sequence, item - first, items


@triton.jit
def find_sequence(rank, q_starts, kv_lens, num_rows, num_seqs, LEAST: tl.constexpr):
    """Return the live sequence of LEAST tokens or more before which there are ``rank``, and how many there are."""
    sequence, _, items = find_chunk(rank, q_starts, kv_lens, num_rows, num_seqs, LEAST, 1 << 30, False)
    return sequence, items
