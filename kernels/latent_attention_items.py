"""What work there is in a step of latent attention, found by a Gluon kernel as ``latent_attention_triton`` finds it.

An item of work is a tile of 64 (query, head) rows of a sequence with a split of its keys.
"""

# Gluon's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SEQUENCES = gl.constexpr(128)
"""Sequences that a program looks at together."""
UNSPLIT = gl.constexpr(1 << 30)
"""More keys than any sequence has."""


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def work(sequence, q_starts, kv_lens, num_rows, num_seqs, HEADS: gl.constexpr):
    """Return how many tiles sequences have, and how many keys a tile of theirs sweeps over at most.

    The rows past the last sequence form one more, without keys.
    """
    first = gl.load(q_starts + sequence, mask=sequence <= num_seqs, other=0)
    end = gl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
    keys = gl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    count = gl.where(sequence <= num_seqs, end - first, 0)
    return gl.cdiv(count * HEADS, 64), keys


@gluon.jit
def share_of(q_starts, kv_lens, num_rows, num_seqs, most, least_keys, HEADS: gl.constexpr):
    """Return of how many keys at least a split is made."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    keys_in_all = (num_seqs * 0).to(gl.int64)
    for start in range(0, num_seqs + 1, SEQUENCES):
        sequence = start + gl.arange(0, SEQUENCES, layout=FLAT)
        tiles, keys = work(sequence, q_starts, kv_lens, num_rows, num_seqs, HEADS)
        keys_in_all += gl.sum(tiles.to(gl.int64) * keys, 0)
    return gl.maximum(gl.cdiv(keys_in_all, most), least_keys).to(gl.int32)


@gluon.jit
def find(item, share, q_starts, kv_lens, num_rows, num_seqs, HEADS: gl.constexpr):
    """Return (sequence of an item of work, its number among those of the sequence, splits in the workspace that belong
    to sequences before, items in all)."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sequence = num_seqs * 0
    first, places, items = sequence, sequence, sequence
    for start in range(0, num_seqs + 1, SEQUENCES):
        each = start + gl.arange(0, SEQUENCES, layout=FLAT)
        tiles, keys = work(each, q_starts, kv_lens, num_rows, num_seqs, HEADS)
        splits = gl.maximum(keys // share, 1)
        amount = tiles * splits
        kept = gl.where(splits > 1, amount, 0)
        upto = gl.associative_scan(amount, 0, _plus) + items
        before = upto <= item
        sequence += gl.sum(before.to(gl.int32), 0)
        first = gl.maximum(first, gl.max(gl.where(before, upto, 0), 0))
        places += gl.sum(gl.where(before, kept, 0), 0)
        items = gl.max(upto, 0)
    return sequence, item - first, places, items
