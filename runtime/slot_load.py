"""What the host sends to a slot beside the packet: arrays of requests that change their logits, and forked answers.

Most admissions have nothing of it. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS, Control
from treadle.runtime.sequence import Sequence

Array = npt.NDArray[np.generic]

_IN_PROMPT = np.int16(-(1 << 15))
_MAX_COUNT = (1 << 15) - 1


@dataclass(frozen=True)
class SlotLoad:
    """New content of one slot: each array goes to the beginning of the slot's row."""

    slot: int
    arrays: dict[str, Array]
    """by the name of a field of ``Controls``"""
    pages: tuple[tuple[int, ...], ...] = ()
    """its pages of each group, where the packet does not bring them; ``arrays`` then has its row too"""
    block: int | None = None
    """where its block has moved to, in units of 256 bytes"""
    history: Array | None = field(default=None)
    """int32, every token known, for processors"""


def slot_load(sequence: Sequence, vocab: int) -> SlotLoad | None:
    """Return what an admitted sequence needs beside its row, None if that is nothing."""
    params, arrays = sequence.params, dict[str, Array]()
    assert sequence.slot is not None, "an admitted sequence has a slot"
    if sequence.controls & Control.PENALTIES:
        arrays["counts"] = _counts(sequence, vocab)
    if sequence.controls & Control.FORBIDDEN:
        arrays["forbidden"] = _forbidden(sequence, vocab)
    if params.logit_bias:
        arrays["bias_ids"] = np.fromiter(params.logit_bias, np.int32)
        arrays["bias_values"] = np.fromiter(params.logit_bias.values(), np.float32)
    if sequence.controls & Control.WORDS:
        arrays["words"], arrays["recent"] = _words(sequence), _recent(sequence)
    if params.logprob_token_ids:
        arrays["asked"] = np.array(params.logprob_token_ids, np.int32)
    history = None if sequence.processors is None else np.array(sequence.tokens, np.int32)
    if not arrays and history is None:
        return None
    return SlotLoad(slot=sequence.slot, arrays=arrays, history=history)


def fork_load(sequence: Sequence, row: Array, pages: Sequences[Sequences[int]], vocab: int) -> SlotLoad:
    """Return all content of the slot of a forked sequence: its ``row``, its pages, and what ``slot_load`` gives."""
    assert sequence.slot is not None, "a forked sequence has a slot"
    more = slot_load(sequence, vocab)
    arrays = {"rows": row} if more is None else {"rows": row, **more.arrays}
    history = None if more is None else more.history
    return SlotLoad(slot=sequence.slot, arrays=arrays, pages=tuple(map(tuple, pages)), history=history)


def _counts(sequence: Sequence, vocab: int) -> Array:
    """Return how often the answer holds each token, with the sign bit for those of the prompt: [V] int16."""
    tokens = np.array(sequence.tokens, np.int32)
    prompt, answer = tokens[: sequence.prompt_len], tokens[sequence.prompt_len :]
    counts = np.minimum(np.bincount(answer, minlength=vocab), _MAX_COUNT).astype(np.int16)
    counts[prompt] |= _IN_PROMPT
    return counts


def _forbidden(sequence: Sequence, vocab: int) -> Array:
    """Return a bit for each token that is never drawn, [ceil(V / 32)] int32."""
    allowed = sequence.params.allowed_token_ids
    forbidden = np.full(-(-vocab // 32) * 32, allowed is not None)
    forbidden[list(allowed or ())] = False
    forbidden[[word[0] for word in sequence.bad_token_ids if len(word) == 1]] = True
    return np.packbits(forbidden, bitorder="little").view(np.int32)


def _words(sequence: Sequence) -> Array:
    words = np.full((MAX_BAD_WORDS, MAX_BAD_TOKENS), -1, np.int32)
    for row, word in enumerate(word for word in sequence.bad_token_ids if len(word) > 1):
        words[row, -len(word) :] = word
    return words


def _recent(sequence: Sequence) -> Array:
    """Return the last tokens of the answer, token i at i modulo MAX_BAD_TOKENS."""
    recent = np.full(MAX_BAD_TOKENS, -1, np.int32)
    count = sequence.num_outputs
    for index in range(max(0, count - MAX_BAD_TOKENS), count):
        recent[index % MAX_BAD_TOKENS] = sequence.tokens[sequence.prompt_len + index]
    return recent
