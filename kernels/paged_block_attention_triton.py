"""paged_block_attention on a GPU: blocks are chosen (block_choice_triton), then each query sees those of its heads.

    attend_blocks   a program per (query, heads that share kv head and index head), or per span of its keys as well
    join_blocks     joins the spans of a query, where programs shared them

A program sweeps over the places of the list that names a query's blocks: decodes and chunks of prompts are the same
work, and no row has to do with another. Spans are added up and joined as in paged_attention_invariant_triton: whether
programs share them changes no bit.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.state import UNIT_BYTES
from treadle.graph.workspace import CHOICE_BYTES, PARTIAL_BYTES
from treadle.kernels.block_choice_triton import choose_blocks
from treadle.kernels.cache_write import rows_contiguous
from treadle.kernels.cache_write_triton import alignment
from treadle.kernels.latent_attention_launch import ELEMENTS, padded
from treadle.kernels.paged_attention_invariant_triton import _merge
from treadle.kernels.paged_attention_triton import NOTHING, _owner, finish

SPAN = 256
"""Places of a list of keys that are added up from the start."""


@triton.jit
def _keys_of(chosen, place, hi, at, BLOCK: tl.constexpr):
    """Return (position of the key at each place of a list of blocks, whether a query at ``at`` sees it)."""
    block = tl.load(chosen + place // BLOCK, mask=place < hi, other=-1)
    t = block * BLOCK + place % BLOCK
    live = (block >= 0) & (t <= at)
    return tl.where(live, t, 0), live


@triton.jit
def _span(
    q, keys, values, pages, chosen, lo, hi, at, scale,
    BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the softmax over the keys at the places lo .. hi - 1."""
    log2e: tl.constexpr = 1.4426950408889634
    ck, cv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # Keys and pages are looked up a step ahead, so that none waits for its own look-up.
    next_t, next_live = _keys_of(chosen, lo + tl.arange(0, BLOCK_N), hi, at, BLOCK)
    next_page = tl.load(pages + next_t // PAGE, mask=next_live, other=0)
    for start in range(lo, hi, BLOCK_N):
        t, live, page = next_t, next_live, next_page.to(tl.int64) * UNIT
        next_t, next_live = _keys_of(chosen, start + BLOCK_N + tl.arange(0, BLOCK_N), hi, at, BLOCK)
        next_page = tl.load(pages + next_t // PAGE, mask=next_live, other=0)
        k_at = keys + (page + (t % PAGE) * K_DIM)[:, None] + ck[None, :]
        v_at = values + (page + (t % PAGE) * V_DIM)[:, None] + cv[None, :]
        k = tl.load(k_at, mask=live[:, None] & (ck < K_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=live[:, None] & (cv < V_DIM)[None, :], other=0.0)
        logit = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee") * (scale * log2e)
        logit = tl.where(live[None, :], logit, NOTHING)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _places(q_starts, kv_lens, row, num_seqs, BLOCK: tl.constexpr, TOPK: tl.constexpr):
    """Return (sequence of a row, its position, places of its list); a row without a live sequence has no place."""
    sequence = _owner(q_starts, row, num_seqs)
    end = tl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=0)
    length = tl.load(kv_lens + sequence, mask=sequence < num_seqs, other=0)
    at = tl.where(length > 0, length - end + row, -1)
    return sequence, at, tl.where(at >= 0, tl.minimum(tl.maximum(at, 0) // BLOCK + 1, TOPK) * BLOCK, 0)


@triton.jit(do_not_specialize=["split", "most", "num_seqs", "table_stride"])
def attend_blocks(
    q, out, partial, stats, chosen, arena, page_table, q_starts, kv_lens, layer_offset,
    split, most, num_seqs, q_stride, table_stride, scale,
    SPAN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, TOPK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, groups of GROUP heads, 1), or with ``split`` (rows, groups, spans that a list has at most)."""
    row, first_head, span = tl.program_id(0), tl.program_id(1) * GROUP, tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, at, hi = _places(q_starts, kv_lens, row, num_seqs, BLOCK, TOPK)
    spans = tl.cdiv(hi, SPAN)
    if split != 0:
        spans = tl.minimum(spans, span + 1)
    member, ck, cv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    head, inside = first_head + member, member < GROUP
    q_at = q + row.to(tl.int64) * q_stride + (head * K_DIM)[:, None] + ck[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & (ck < K_DIM)[None, :], other=0.0).to(COMPUTE)
    kv_head, index_head = first_head // (HEADS // KV_HEADS), first_head // (HEADS // INDEX_HEADS)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    keys = arena + (offset + kv_head * (PAGE * K_DIM))
    values = arena + (offset + KV_HEADS * (PAGE * K_DIM) + kv_head * (PAGE * V_DIM))
    pages = page_table + sequence.to(tl.int64) * table_stride
    mine = chosen + (row.to(tl.int64) * INDEX_HEADS + index_head) * TOPK
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for each in range(span, spans):
        part_top, part_total, part = _span(
            queries, keys, values, pages, mine, each * SPAN, tl.minimum((each + 1) * SPAN, hi), at, scale, BLOCK,
            K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_M, BLOCK_N, PAGE, UNIT, COMPUTE,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    if split != 0:
        place, kept = (row.to(tl.int64) * HEADS + head) * most + span, inside & (span + member * 0 < spans)
        tl.store(partial + (place * V_DIM)[:, None] + cv[None, :], acc, mask=kept[:, None] & (cv < V_DIM)[None, :])
        tl.store(stats + place * 2, top, mask=kept)
        tl.store(stats + place * 2 + 1, total, mask=kept)
    else:
        result = finish(top, total, acc, stats, head, inside, False)
        out_at = out + ((row.to(tl.int64) * HEADS + head) * V_DIM)[:, None] + cv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside[:, None] & (cv < V_DIM)[None, :])


@triton.jit(do_not_specialize=["most", "num_seqs"])
def join_blocks(
    partial, stats, out, q_starts, kv_lens, most, num_seqs,
    SPAN: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    one, cv = tl.arange(0, 1), tl.arange(0, BLOCK_V)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, _, hi = _places(q_starts, kv_lens, row, num_seqs, BLOCK, TOPK)
    top = tl.full((1,), NOTHING, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_V), tl.float32)
    first = (row.to(tl.int64) * HEADS + head) * most
    for span in range(tl.cdiv(hi, SPAN)):
        place = first + span + one
        part_top, part_total = tl.load(stats + place * 2), tl.load(stats + place * 2 + 1)
        part = tl.load(partial + (place * V_DIM)[:, None] + cv[None, :], mask=(cv < V_DIM)[None, :], other=0.0)
        top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    result = finish(top, total, acc, stats, head + one, one == 0, False)
    out_at = out + ((row.to(tl.int64) * HEADS + head + one) * V_DIM)[:, None] + cv[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(cv < V_DIM)[None, :])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def paged_block_attention(
    q: Tensor,
    index_q: Tensor,
    arena: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    layer_offset: Tensor,
    keys_offset: Tensor,
    page_tokens: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    block: int,
    topk: int,
    local: int,
    *,
    pdl: bool = False,
    invariant: bool = False,  # noqa: ARG001  (a row is computed alike in every step)
    split: bool | None = None,
    choice_bytes: int = CHOICE_BYTES,
) -> Tensor:
    """Return ``paged_block_attention``'s result; ``split`` replaces the choice whether programs share a row's keys.

    Shapes: as the reference. ``choice_bytes``: as ``choose_blocks``.
    """
    assert page_table.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert layer_offset.dtype is keys_offset.dtype is torch.int64
    q = rows_contiguous(q)
    tokens, heads, k_dim = q.shape
    index_heads, item = index_q.shape[1], q.element_size()
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    chosen = choose_blocks(
        index_q, arena, page_table, q_starts, kv_lens, keys_offset, page_tokens, block, topk, local, pdl=pdl,
        choice_bytes=choice_bytes,
    )  # fmt: skip
    group = math.gcd(heads // kv_heads, heads // index_heads)
    most = triton.cdiv(min(topk * block, page_table.shape[1] * page_tokens + block), SPAN)
    if split is None:
        fits = tokens * heads * most * (v_dim + 2) * 4 <= PARTIAL_BYTES
        split = fits and tokens * (heads // group) < 2 * _processors(q.device)
    places = tokens * heads * most if split else 0
    partial = torch.empty(places * v_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(places * 2, dtype=torch.float32, device=q.device)
    shared: dict[str, Any] = {
        "SPAN": SPAN,
        "HEADS": heads,
        "BLOCK": block,
        "TOPK": topk,
        "V_DIM": v_dim,
        "BLOCK_V": padded(v_dim),
        "PDL": pdl,
        # What is multiplied and added is rounded twice wherever it is done: two kernels join spans alike.
        "enable_fp_fusion": False,
        "num_warps": 4,
        **({"launch_pdl": True} if pdl else {}),
    }
    attend_blocks[(tokens, heads // group, most if split else 1)](
        q, out, partial, stats, chosen, arena.view(q.dtype), page_table, q_starts, kv_lens, layer_offset, int(split),
        most, kv_lens.shape[0], q.stride(0), page_table.stride(0), scale, KV_HEADS=kv_heads, INDEX_HEADS=index_heads,
        GROUP=group, K_DIM=k_dim, BLOCK_K=padded(k_dim), BLOCK_M=padded(group), BLOCK_N=16 if item == 4 else 64,
        PAGE=page_tokens, UNIT=UNIT_BYTES // item, ALIGNMENT=alignment(item, page_tokens, k_dim, v_dim),
        # The interpreter's bfloat16 arithmetic is wrong.
        COMPUTE=tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[q.dtype], num_stages=2, **shared,
    )  # fmt: skip
    if split:
        join_blocks[(tokens, heads)](partial, stats, out, q_starts, kv_lens, most, kv_lens.shape[0], **shared)
    return out
