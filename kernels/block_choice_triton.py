"""The choice of paged_block_attention on a GPU: a Triton kernel scores all blocks of keys, torch takes the highest.

A block's score and its number are one integer, the score above: integers differ, so that what is chosen of equal scores
(the latest) does not depend on how it is looked for. Rows go in parts whose scores fit CHOICE_BYTES.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.state import UNIT_BYTES
from treadle.graph.workspace import CHOICE_BYTES
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment
from treadle.kernels.latent_attention_launch import ELEMENTS, padded
from treadle.kernels.skinny import launch_options

TILE_ROWS = 32
"""(query, index head) rows that a program scores, whatever the step: products of other shapes round otherwise."""
LOW_BITS = 0xFFFFFFFF
UNSEEN = -(1 << 63)
"""Stands for a block that a query does not see, below all others."""


@triton.jit
def _place(row, first_row, num_rows):
    """Return where a row of the step is among ``num_rows`` rows from ``first_row`` on; the nearest end elsewhere."""
    return tl.minimum(tl.maximum(row - first_row, 0), num_rows)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_seqs", "blocks", "table_stride"])
def rank_blocks(
    q, ranks, arena, page_table, q_starts, kv_lens, keys_offset,
    first_row, num_rows, num_seqs, blocks, q_stride, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, LOCAL: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, ALIGNMENT: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, tiles): ranks [num_rows, HEADS, blocks] int64, for the rows from ``first_row`` on.

    Sequence s has the tiles from (its first row) // TOKENS + s on, at most one too many.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    block, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, above = num_seqs * 0, num_seqs + 1
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if _place(tl.load(q_starts + middle), first_row, num_rows) // TOKENS + middle <= tile:
            sequence = middle
        else:
            above = middle
    here = _place(tl.load(q_starts + sequence), first_row, num_rows)
    begin = here + (tile - (here // TOKENS + sequence)) * TOKENS
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=first_row + num_rows)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    after = _place(end, first_row, num_rows)
    if begin >= after:
        return
    member, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, head = begin + member // HEADS, member % HEADS
    inside = (member < TOKENS * HEADS) & (row < after)
    # A stopped sequence has no keys, whatever its rows' places.
    at = tl.where(inside & (length > 0), length - end + first_row + row, -1)
    q_at = q + ((first_row + row).to(tl.int64) * q_stride + head * DIM)[:, None] + d[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0).to(COMPUTE)
    keys = arena + tl.multiple_of(tl.load(keys_offset) // (256 // UNIT), ALIGNMENT)
    pages = page_table + sequence.to(tl.int64) * table_stride
    lo = block * BLOCK
    hi = tl.minimum(lo + BLOCK, tl.max(at, 0) + 1)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(lo, hi, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        live = t < hi
        page = tl.load(pages + t // PAGE, mask=live, other=0).to(tl.int64) * UNIT
        k_at = keys + (page + (t % PAGE) * DIM)[:, None] + d[None, :]
        k = tl.load(k_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(k.to(COMPUTE)), input_precision="ieee")
        seen = live[None, :] & (t[None, :] <= at[:, None])
        best = tl.maximum(best, tl.max(tl.where(seen, score, float("-inf")), 1))
    if LOCAL > 0:
        last = tl.maximum(at, 0) // BLOCK
        best = tl.where((block <= last) & (last - block < LOCAL), float("inf"), best)
    bits = best.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    # What is not a number is not chosen either.
    rank = tl.where((lo <= at) & (best > float("-inf")), ordered * 4294967296 + block, -9223372036854775808)
    tl.store(ranks + (row.to(tl.int64) * HEADS + head) * blocks + block, rank, mask=inside)


def choose_blocks(
    q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    keys_offset: Tensor,
    page_tokens: int,
    block: int,
    topk: int,
    local: int,
    *,
    pdl: bool = False,
    choice_bytes: int = CHOICE_BYTES,
) -> Tensor:
    """Return the blocks that index heads see, ascending, -1 behind them; rows in parts of ``choice_bytes`` of scores.

    Shapes: q [T, HI, DI]; the result [T, HI, topk] int32; the rest as ``paged_block_attention``.
    """
    q = rows_contiguous(q)
    tokens, heads, dim = q.shape
    sequences, item = kv_lens.shape[0], q.element_size()
    chosen = torch.full((tokens, heads, topk), -1, dtype=torch.int32, device=q.device)
    blocks = triton.cdiv(page_table.shape[1] * page_tokens, block)
    tile_rows = max(TILE_ROWS, padded(heads))
    part = max(1, choice_bytes // (8 * heads * max(blocks, topk)))
    for first in range(0, tokens, part):
        rows = min(part, tokens - first)
        ranks = torch.empty((rows, heads, blocks), dtype=torch.int64, device=q.device)
        rank_blocks[(blocks, rows // (tile_rows // heads) + sequences + 1)](
            q, ranks, arena.view(q.dtype), page_table, q_starts, kv_lens, keys_offset, first, rows, sequences, blocks,
            q.stride(0), page_table.stride(0), HEADS=heads, DIM=dim, BLOCK_D=padded(dim), BLOCK_M=tile_rows,
            BLOCK_N=min(padded(block), 16 if item == 4 else 64), BLOCK=block, LOCAL=local, PAGE=page_tokens,
            UNIT=UNIT_BYTES // item, ALIGNMENT=alignment(item, page_tokens, dim),
            # The interpreter's bfloat16 arithmetic is wrong.
            COMPUTE=tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype], PDL=pdl,
            num_warps=8 if item == 4 else 4, **launch_options(pdl),
        )  # fmt: skip
        best = ranks.topk(min(topk, blocks), dim=-1, sorted=False).values
        where = torch.where(best == UNSEEN, LOW_BITS, best & LOW_BITS).sort(dim=-1).values
        chosen[first : first + rows, :, : where.shape[2]] = torch.where(where == LOW_BITS, -1, where)
    return chosen
