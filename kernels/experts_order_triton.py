"""Triton kernels that group the pairs (token, chosen expert) by expert, all on the device, in grids of fixed size.

Pair p = token * k + j has id ids[p]. Ids outside 0 .. E-1 form one more group, E, behind all others.

    count   each CHUNK of pairs: how many of them are in each group
    place   order [P]: the pairs of group 0, then of group 1, ..., inside a group in the order in which they came;
            table [B, 3]: of every block of up to ROWS pairs of one group: the group, and its first and last + 1 place
            in ``order``. Blocks beyond the last are empty: first = last + 1
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.expert_rows import CHUNK, blocks_bound
from treadle.kernels.skinny import launch_options

TILE = 8192
"""(pair, group) flags that a program holds at a time."""


@triton.jit
def group_of(ids, at, mask, E):
    """Return the groups of pairs; -1 where masked out."""
    e = tl.load(ids + at, mask=mask, other=-1)
    return tl.where(mask, tl.where((e >= 0) & (e < E), e, E).to(tl.int32), -1)


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, E, CHUNK: tl.constexpr, EP: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    c = tl.program_id(0)
    e = tl.arange(0, EP)
    number = tl.zeros([EP], tl.int32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, CHUNK, STEP):
        p = c * CHUNK + start + tl.arange(0, STEP)
        group = group_of(ids, p, p < pairs, E)
        number += tl.sum((group[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts + c * EP + e, number)


@triton.jit(do_not_specialize=["pairs", "bound", "each"])
def _place(
    ids, counts, order, table, pairs, E, bound, each,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EP: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``each``: entries of the table that a program writes."""
    c, chunks = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EP)
    s = tl.arange(0, STEP)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, chunks, STEP):
        chunk = start + s
        there = (chunk < chunks)[:, None] & (e >= 0)[None, :]
        number = tl.load(counts + chunk[:, None] * EP + e[None, :], mask=there, other=0)
        total += tl.sum(number, 0)
        before += tl.sum(tl.where((chunk < c)[:, None], number, 0), 0)
    first = tl.cumsum(total, 0) - total
    following = first + before
    for start in range(0, CHUNK, STEP):
        p = c * CHUNK + start + s
        group = group_of(ids, p, p < pairs, E)
        mine = group[:, None] == e[None, :]
        # earlier ones of the same group among these STEP
        same = (group[:, None] == group[None, :]) & (s[None, :] < s[:, None])
        at = tl.sum(tl.where(mine, following[None, :], 0), 1) + tl.sum(same.to(tl.int32), 1)
        tl.store(order + at, p, mask=p < pairs)
        following += tl.sum(mine.to(tl.int32), 0)
    blocks = (total + (ROWS - 1)) // ROWS
    through = tl.cumsum(blocks, 0)
    for start in range(0, each, STEP):
        b = c * each + start + s
        group = tl.sum((through[None, :] <= b[:, None]).to(tl.int32), 1)
        mine = group[:, None] == e[None, :]
        begin = tl.sum(tl.where(mine, (first - (through - blocks) * ROWS)[None, :], 0), 1) + b * ROWS
        end = tl.minimum(tl.sum(tl.where(mine, (first + total)[None, :], 0), 1), begin + ROWS)
        mask = (b < bound) & (start + s < each)
        tl.store(table + b * 3, group, mask=mask)
        tl.store(table + b * 3 + 1, tl.where(group < EP, begin, 0), mask=mask)
        tl.store(table + b * 3 + 2, tl.where(group < EP, end, 0), mask=mask)


def group_pairs(ids: Tensor, experts: int, rows: int, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Return order [P] and table [B, 3], int32, for blocks of up to ``rows`` pairs. Shapes: ids [P] dense, P > 0."""
    pairs = ids.numel()
    chunks = triton.cdiv(pairs, CHUNK)
    columns = triton.next_power_of_2(experts + 1)
    bound = blocks_bound(pairs, experts, rows)
    workspace = [ids.new_empty(shape, dtype=torch.int32) for shape in ((chunks, columns), (pairs,), (bound, 3))]
    counts, order, table = workspace
    options = {
        "CHUNK": CHUNK,
        "EP": columns,
        "STEP": max(1, min(32, TILE // columns)),
        "PDL": pdl,
        "num_warps": 8,
        **launch_options(pdl),
    }
    _count[(chunks,)](ids, counts, pairs, experts, **options)
    _place[(chunks,)](
        ids, counts, order, table, pairs, experts, bound, triton.cdiv(bound, chunks), ROWS=rows, **options
    )
    return order, table
