"""paged_index_select on a GPU: a Triton kernel scores all keys, torch takes the highest.

A key's score and its position are one integer, the score above: integers differ, so that what is chosen of equal scores
does not depend on how it is looked for. Rows go in blocks whose scores fit CHOICE_BYTES.
"""

from __future__ import annotations

from typing import Any

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
from treadle.kernels.paged_attention_triton import _owner
from treadle.kernels.skinny import launch_options

BLOCK_N = 64
"""Keys that a program scores."""
LOW_BITS = 0xFFFFFFFF
UNSEEN = -(1 << 63)
"""Stands for a key that a token does not see, below all others."""


@triton.jit(do_not_specialize=["first_row", "num_seqs", "reach", "table_stride"])
def rank_keys(  # type: ignore[no-untyped-def]
    q, weights, ranks, arena, page_table, q_starts, kv_lens, layer_offset,
    first_row, num_seqs, reach, q_stride, weights_stride, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, ALIGNMENT: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of keys): ranks [rows, reach] int64 of the keys that rows from ``first_row`` on may see."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + tl.program_id(0)
    sequence = _owner(q_starts, row, num_seqs)
    real = sequence < num_seqs
    end = tl.load(q_starts + sequence + 1, mask=real, other=0)
    length = tl.load(kv_lens + sequence, mask=real, other=0)
    # A stopped sequence has no keys, whatever its rows' places.
    count = tl.where(length > 0, length - (end - row) + 1, 0)
    t = block * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = t < count
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    page = tl.load(page_table + sequence.to(tl.int64) * table_stride + t // PAGE, mask=seen, other=0).to(tl.int64)
    keys = arena + tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    k_at = keys + (page * UNIT + t % PAGE * DIM)[:, None] + d[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k = tl.load(k_at, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
    q_at = q + row.to(tl.int64) * q_stride + (h * DIM)[:, None] + d[None, :]
    query = tl.load(q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
    weight = tl.load(weights + row.to(tl.int64) * weights_stride + h, mask=h < HEADS, other=0.0).to(tl.float32)
    product = tl.dot(query.to(COMPUTE), tl.trans(k.to(COMPUTE)), input_precision="ieee")
    score = tl.sum(weight[:, None] * tl.maximum(product, 0.0), 0)
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    rank = ordered * 4294967296 + (4294967295 - t.to(tl.int64))
    rank = tl.where(seen & (score == score), rank, -9223372036854775808)
    tl.store(ranks + place * reach + t, rank, mask=t < reach)


def paged_index_select(
    q: Tensor,
    weights: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    topk: int,
    *,
    pdl: bool = False,
    invariant: bool = False,  # noqa: ARG001  (a row is computed alike in every step)
    choice_bytes: int = CHOICE_BYTES,
) -> Tensor:
    """Return ``paged_index_select``'s result, rows in blocks of ``choice_bytes`` of scores.

    Shapes: as the reference.
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is torch.int64
    q = rows_contiguous(q)
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, topk), dtype=torch.int32, device=q.device)
    reach, item = page_table.shape[1] * page_tokens, q.element_size()
    block = max(1, choice_bytes // (8 * max(reach, topk)))
    options: dict[str, Any] = launch_options(pdl)
    for first in range(0, tokens, block):
        rows = min(block, tokens - first)
        ranks = torch.empty((rows, reach), dtype=torch.int64, device=q.device)
        rank_keys[(rows, triton.cdiv(reach, BLOCK_N))](
            q,
            weights,
            ranks,
            arena.view(q.dtype),
            page_table,
            q_starts,
            kv_lens,
            layer_offset,
            first,
            kv_lens.shape[0],
            reach,
            q.stride(0),
            weights.stride(0),
            page_table.stride(0),
            HEADS=heads,
            DIM=dim,
            BLOCK_H=padded(heads),
            BLOCK_D=padded(dim),
            BLOCK_N=BLOCK_N,
            PAGE=page_tokens,
            UNIT=UNIT_BYTES // item,
            ALIGNMENT=alignment(item, page_tokens, dim),
            # The interpreter's bfloat16 arithmetic is wrong.
            COMPUTE=tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype],
            PDL=pdl,
            num_warps=4,
            **options,
        )
        best = ranks.topk(min(topk, reach), dim=-1, sorted=False).values
        where = torch.where(best == UNSEEN, LOW_BITS, LOW_BITS - (best & LOW_BITS)).sort(dim=-1).values
        chosen = torch.where(where == LOW_BITS, -1, where).to(torch.int32)
        out[first : first + rows, : chosen.shape[1]] = chosen
        out[first : first + rows, chosen.shape[1] :] = -1
    return out
