"""adjust_logits in Triton: two launches, and one for the counts; nothing that the host must know of what slots hold.

dense    each block of a row in float32, without forbidden tokens, penalties taken off
sparse   each row: biased tokens again from the logits, since a bias comes before penalties; then bad words
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, SLOT_WIDTH, Column, Control
from treadle.kernels.adjust_logits import MAX_COUNT, Controls

BLOCK = 4096

_WIDTH = tl.constexpr(SLOT_WIDTH)
_INF = tl.constexpr(float("inf"))
_MAX_COUNT = tl.constexpr(MAX_COUNT)
_BIASES, _WORDS, _TOKENS = tl.constexpr(MAX_BIASES), tl.constexpr(MAX_BAD_WORDS), tl.constexpr(MAX_BAD_TOKENS)
_HAS_PENALTIES, _HAS_FORBIDDEN, _HAS_WORDS = (
    tl.constexpr(int(control)) for control in (Control.PENALTIES, Control.FORBIDDEN, Control.WORDS)
)
_CONTROLS, _NUM_BIASES, _TOKEN_INDEX = (
    tl.constexpr(int(column)) for column in (Column.CONTROLS, Column.NUM_BIASES, Column.TOKEN_INDEX)
)
_PRESENCE, _FREQUENCY, _REPETITION = (
    tl.constexpr(2 * int(column)) for column in (Column.PRESENCE, Column.FREQUENCY, Column.REPETITION)
)


@triton.jit
def _change(v, ids, inside, slot, flags, reals, counts, forbidden, V, words_a_slot):
    """Return the logits ``v`` of tokens ``ids`` without forbidden ones and with penalties."""
    if (flags & _HAS_FORBIDDEN) != 0:
        bits = tl.load(forbidden + slot * words_a_slot + ids // 32, mask=inside, other=0)
        v = tl.where(((bits >> (ids % 32)) & 1) != 0, -_INF, v)
    if (flags & _HAS_PENALTIES) != 0:
        row = reals + slot * 2 * _WIDTH
        presence, frequency = tl.load(row + _PRESENCE), tl.load(row + _FREQUENCY)
        repetition = tl.load(row + _REPETITION)
        count = tl.load(counts + slot * V + ids, mask=inside, other=0).to(tl.int32)
        number = (count & _MAX_COUNT).to(tl.float32)
        repeated = tl.where(v > 0, tl.div_rn(v, tl.zeros_like(v) + repetition), v * repetition)
        v = tl.where(count != 0, repeated, v) - frequency * number - presence * (number > 0).to(tl.float32)
    return v


@triton.jit
def _dense(logits, row_stride, out, V, slots, rows, reals, counts, forbidden, words_a_slot, BLOCK: tl.constexpr):
    r = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + r)
    flags = tl.load(rows + slot * _WIDTH + _CONTROLS)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    v = tl.load(logits + r * row_stride + ids, mask=inside, other=-_INF).to(tl.float32)
    v = _change(v, ids, inside, slot, flags, reals, counts, forbidden, V, words_a_slot)
    tl.store(out + r * V + ids, v, mask=inside)


@triton.jit
def _sparse(
    logits, row_stride, out, V, slots, rows, reals, counts, forbidden, words_a_slot, bias_ids, bias_values, words,
    recent,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    row = rows + slot * _WIDTH
    flags, biases = tl.load(row + _CONTROLS), tl.load(row + _NUM_BIASES)
    if biases > 0:
        each = tl.arange(0, _BIASES)
        inside = each < biases
        ids = tl.load(bias_ids + slot * _BIASES + each, mask=inside, other=0)
        bias = tl.load(bias_values + slot * _BIASES + each, mask=inside, other=0.0)
        v = tl.load(logits + r * row_stride + ids, mask=inside, other=0.0).to(tl.float32) + bias
        v = _change(v, ids, inside, slot, flags, reals, counts, forbidden, V, words_a_slot)
        tl.store(out + r * V + ids, v, mask=inside)
    if (flags & _HAS_WORDS) != 0:
        # what biases stored must not come after
        tl.debug_barrier()
        index = tl.load(row + _TOKEN_INDEX)
        word, place = tl.arange(0, _WORDS), tl.arange(0, _TOKENS)
        back = _TOKENS - 1 - place
        before = tl.load(recent + slot * _TOKENS + (index - back + _TOKENS) % _TOKENS, mask=back <= index, other=-2)
        start = words + slot * _WORDS * _TOKENS
        wanted = tl.load(start + word[:, None] * _TOKENS + place[None, :])
        fits = (wanted == -1) | (wanted == before[None, :]) | (back == 0)[None, :]
        last = tl.load(start + word * _TOKENS + _TOKENS - 1)
        complete = (tl.min(fits.to(tl.int32), 1) > 0) & (last >= 0)
        tl.store(out + r * V + last, tl.full([_WORDS], -_INF, tl.float32), mask=complete)


@triton.jit
def _note(tokens, slots, rows, counts, recent, V):
    r = tl.program_id(0)
    slot, token = tl.load(slots + r), tl.load(tokens + r)
    row = rows + slot * _WIDTH
    flags = tl.load(row + _CONTROLS)
    if token >= 0:
        if (flags & _HAS_PENALTIES) != 0:
            at = counts + slot * V + token
            count = tl.load(at)
            grows = (count.to(tl.int32) & _MAX_COUNT) < _MAX_COUNT
            tl.store(at, (count.to(tl.int32) + grows.to(tl.int32)).to(tl.int16))
        if (flags & _HAS_WORDS) != 0:
            index = tl.load(row + _TOKEN_INDEX)
            tl.store(recent + slot * _TOKENS + index % _TOKENS, token.to(tl.int32))


def adjust_logits(logits: Tensor, slots: Tensor, controls: Controls) -> Tensor:
    """Return the adjusted logits, float32 [R, V]. Shapes: as ``adjust_logits``."""
    count, vocab = logits.shape
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    if count == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    reals = controls.rows.view(torch.float32)
    shared = (
        logits, logits.stride(0), out, vocab, slots, controls.rows, reals, controls.counts, controls.forbidden,
        controls.forbidden.shape[1],
    )  # fmt: skip
    _dense[(triton.cdiv(vocab, BLOCK), count)](*shared, BLOCK=BLOCK, num_warps=8)
    _sparse[(count,)](
        *shared, controls.bias_ids, controls.bias_values, controls.words, controls.recent, num_warps=4
    )  # fmt: skip
    return out


def note_tokens(tokens: Tensor, slots: Tensor, controls: Controls) -> None:
    """Count tokens in one launch. Shapes: as ``note_tokens``."""
    if len(tokens):
        _note[(len(tokens),)](
            tokens, slots, controls.rows, controls.counts, controls.recent, controls.counts.shape[1], num_warps=1
        )
