"""What the host sends to the device for one step, and what the device keeps of each sequence: both as plain integers.

A packet is one run of int32, so that it travels in one copy. Its sections stand at offsets that follow from the shape
of the step alone: a captured graph finds them where they always are. Behind them, found by offsets in the packet,
come contents of slots for new sequences and pages for those that grew. No torch here.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import NamedTuple

from treadle.graph.state import round_up

MAX_STOPS = 32
"""tokens that may end one request, the model's end-of-sequence tokens included"""

MAX_BIASES = 512
"""tokens that one request may give a bias"""

MAX_BAD_WORDS = 32
"""spellings of several tokens that one request may forbid; those of one token are bounded by the vocabulary alone"""

MAX_BAD_TOKENS = 8
"""tokens of one such spelling"""

MAX_ASKED = 64
"""tokens whose log-probabilities one request may ask for by their ids"""

ALIGN = 16
"""Sections start at multiples of 64 bytes, so that kernels meet one alignment only and are specialised once."""


class Column(IntEnum):
    """A slot's state: a row of int64, the stops behind these. Floats stand in the first half of their column."""

    ACTIVE = 0
    LAST_TOKEN = 1
    POSITION = 2
    """of the last token in its sequence"""
    REMAINING = 3
    """tokens that may still be sampled"""
    MIN_LEFT = 4
    TOKEN_INDEX = 5
    """of the next generated token"""
    SEED = 6
    TOP_K = 7
    TEMPERATURE = 8
    TOP_P = 9
    MIN_P = 10
    PRESENCE = 11
    FREQUENCY = 12
    REPETITION = 13
    NUM_BIASES = 14
    CONTROLS = 15
    """which of ``Control`` hold for the sequence; where none does, what its slot has of them is left from another"""
    BLOCK = 16
    """where its block of fixed-size states begins in the arena, in units of 256 bytes"""
    STOPS = 17
    """the first of MAX_STOPS columns; the first stop repeated as padding, -1 where there is none"""


class Control(IntFlag):
    """What a request changes about its logits beside the parameters of the draw, in arrays of its slot."""

    PENALTIES = 1
    """counts: how often the answer holds each token, and whether the prompt does"""
    FORBIDDEN = 2
    """a bit for each token that is never drawn"""
    WORDS = 4
    """runs of tokens that are not completed, and the last tokens of the answer"""


def control_bytes(vocab: int) -> int:
    """Return the bytes of one slot's arrays for ``Control``, biases and asked tokens."""
    words = MAX_BAD_WORDS * MAX_BAD_TOKENS * 4 + MAX_BAD_TOKENS * 4
    return vocab * 2 + -(-vocab // 32) * 4 + words + MAX_BIASES * 8 + MAX_ASKED * 4


SLOT_WIDTH = Column.STOPS + MAX_STOPS
"""int64 of one slot"""


class StepShape(NamedTuple):
    """The sizes of a step's tensors, padding included: tokens, sequences, rows of logits."""

    num_tokens: int
    num_seqs: int
    num_rows: int


class Header(IntEnum):
    """The packet's first integers."""

    NUM_DECODES = 0
    """sequences from the first on that decode: token i is sequence i's, and comes from its slot"""
    NUM_ROWS = 1
    """rows of logits that are sampled; the rest is padding"""


class Sections(NamedTuple):
    """Where the sections of a packet begin, in units of int32."""

    slots: int
    """[B]"""
    q_starts: int
    """[B + 1]"""
    kv_lens: int
    """[B]; the device fills in those of decodes"""
    page_first: int
    """[B], with page_count and page_at: pages from index ``first`` on are the packet's from ``at`` on, ``count`` of
    each group of states, one group behind the other"""
    page_count: int
    page_at: int
    admission_at: int
    """[B], where the new content of the sequence's slot stands, -1 = it stays"""
    seq_ids: int
    """[T]"""
    token_ids: int
    """[T] int64; the device fills in those of decodes, and their positions"""
    positions: int
    """[T] int64"""
    logit_rows: int
    """[R] int64"""
    sample_slots: int
    """[R] int64"""
    end: int


@lru_cache(maxsize=1024)
def sections(shape: StepShape) -> Sections:
    """Return where the sections of a packet of this shape begin."""
    tokens, seqs, rows = shape
    at, begins = round_up(len(Header), ALIGN), list[int]()
    for size in (seqs, seqs + 1, *[seqs] * 5, tokens, 2 * tokens, 2 * tokens, 2 * rows, 2 * rows):
        begins.append(at)
        at = round_up(at + size, ALIGN)
    return Sections(*begins, end=at)  # type: ignore[misc]


def packet_capacity(largest: StepShape, max_pages: int) -> int:
    """Return the int32 that hold any packet up to this shape: every slot new, with all pages of all groups."""
    news = largest.num_seqs * (2 * SLOT_WIDTH + round_up(max_pages, 2))
    return round_up(sections(largest).end + news, ALIGN)
