"""What a program takes and gives at each step. The metadata of a step is an explicit tuple, never a context object."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    """One flat ragged batch: T new tokens of B sequences, decode tokens and prefill chunks alike.

    Shapes: T tokens, B sequences, M pages a sequence at most, R rows whose logits are wanted.
    A token at position -1 is padding or belongs to a stopped sequence: it writes no state.
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, index of the token in its sequence, or -1"""
    seq_ids: Tensor
    """[T] int32, row of the page table"""
    q_starts: Tensor
    """[B + 1] int32, where each sequence's tokens start in the flat batch; sequences are contiguous and in order"""
    kv_lens: Tensor
    """[B] int32, tokens of the sequence that attention may see, this step's included; 0 = stopped, skip"""
    page_table: Tensor
    """[B, M] int32, page offsets in 256-byte units from the arena's start, in sequence order"""
    logit_rows: Tensor
    """[R] int64, which of the T rows get logits"""
