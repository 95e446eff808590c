"""begin_step's Triton kernel: one launch, and nothing that the host must know of what the slots hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.packet import SLOT_WIDTH, Column, Header, StepShape, sections
from treadle.kernels.skinny import launch_options

_WIDTH = tl.constexpr(SLOT_WIDTH)
_WIDTH_P2 = tl.constexpr(triton.next_power_of_2(SLOT_WIDTH))
_ACTIVE, _POSITION, _LAST, _BLOCK = (
    tl.constexpr(int(column)) for column in (Column.ACTIVE, Column.POSITION, Column.LAST_TOKEN, Column.BLOCK)
)
_NUM_DECODES = tl.constexpr(int(Header.NUM_DECODES))


# One program a sequence and run of its table row, in which the groups stand one behind the other. Sizes change with the
# step: no version is made for any of them.
@triton.jit(
    do_not_specialize=[
        "width", "pages", "most", "slots", "kv_lens", "first", "count", "at", "new", "tokens", "positions"
    ]
)  # fmt: skip
def _begin(  # type: ignore[no-untyped-def]
    rows, table, packet, wide, page_tables, blocks, width, pages, most, slots, kv_lens, first, count, at, new, tokens,
    positions, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq = tl.program_id(0)
    slot = tl.load(packet + slots + seq).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < width
    group = entries // pages
    index = entries - group * pages
    begin = tl.load(packet + first + seq)
    more = tl.load(packet + count + seq)
    is_new = (index >= begin) & (index < begin + more) & inside
    place = tl.load(packet + at + seq) + group * more + index - begin
    fresh = tl.load(packet + place, mask=is_new, other=0)
    known = tl.load(table + slot * width + entries, mask=inside, other=0)
    tl.store(table + slot * width + entries, fresh, mask=is_new)
    chosen = page_tables + (group.to(tl.int64) * most + seq) * pages + index
    tl.store(chosen, tl.where(is_new, fresh, known), mask=inside)
    if tl.program_id(1) == 0:
        content = tl.load(packet + new + seq)
        columns = tl.arange(0, _WIDTH_P2)
        admitted = columns < tl.where(content >= 0, _WIDTH, 0)
        row = rows + slot * _WIDTH
        tl.store(row + columns, tl.load(wide + content // 2 + columns, mask=admitted, other=0), mask=admitted)
        # Not from the row, which may have been written just now.
        fresh_block = tl.load(wide + content // 2 + _BLOCK, mask=content >= 0, other=0)
        block = tl.where(content >= 0, fresh_block, tl.load(row + _BLOCK))
        tl.store(blocks + seq, block.to(tl.int32))
        if seq < tl.load(packet + _NUM_DECODES):
            position = tl.load(row + _POSITION)
            position = tl.where(tl.load(row + _ACTIVE) != 0, position, -1)
            tl.store(wide + tokens // 2 + seq, tl.load(row + _LAST))
            tl.store(wide + positions // 2 + seq, position)
            tl.store(packet + kv_lens + seq, (position + 1).to(tl.int32))


def begin_step(
    rows: Tensor, table: Tensor, packet: Tensor, page_tables: Tensor, blocks: Tensor, num_tokens: int, num_seqs: int,
    num_rows: int, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Do ``begin_step`` in one launch; nothing comes back to the host. Shapes: as ``begin_step``."""
    at = sections(StepShape(num_tokens, num_seqs, num_rows))
    _, groups, pages = table.shape
    width = groups * pages
    block = min(1024, triton.next_power_of_2(width))
    wide = packet.view(torch.int64)
    _begin[(num_seqs, triton.cdiv(width, block))](
        rows, table, packet, wide, page_tables, blocks, width, pages, page_tables.shape[1], at.slots, at.kv_lens,
        at.page_first, at.page_count, at.page_at, at.admission_at, at.token_ids, at.positions, BLOCK=block, PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
