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
_ACTIVE, _POSITION, _LAST = (
    tl.constexpr(int(column)) for column in (Column.ACTIVE, Column.POSITION, Column.LAST_TOKEN)
)
_NUM_DECODES = tl.constexpr(int(Header.NUM_DECODES))


# One program a sequence and block of its table row. Sizes change with the step: no version is made for any of them.
@triton.jit(do_not_specialize=["width", "slots", "kv_lens", "first", "count", "at", "new", "tokens", "positions"])
def _begin(  # type: ignore[no-untyped-def]
    rows, table, packet, wide, page_table, width, slots, kv_lens, first, count, at, new, tokens, positions,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq = tl.program_id(0)
    slot = tl.load(packet + slots + seq).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < width
    begin = tl.load(packet + first + seq)
    pages = tl.load(packet + count + seq)
    is_new = (entries >= begin) & (entries < begin + pages) & inside
    fresh = tl.load(packet + tl.load(packet + at + seq) + entries - begin, mask=is_new, other=0)
    known = tl.load(table + slot * width + entries, mask=inside, other=0)
    tl.store(table + slot * width + entries, fresh, mask=is_new)
    tl.store(page_table + seq.to(tl.int64) * width + entries, tl.where(is_new, fresh, known), mask=inside)
    if tl.program_id(1) == 0:
        content = tl.load(packet + new + seq)
        columns = tl.arange(0, _WIDTH_P2)
        admitted = columns < tl.where(content >= 0, _WIDTH, 0)
        row = rows + slot * _WIDTH
        tl.store(row + columns, tl.load(wide + content // 2 + columns, mask=admitted, other=0), mask=admitted)
        if seq < tl.load(packet + _NUM_DECODES):
            position = tl.load(row + _POSITION)
            position = tl.where(tl.load(row + _ACTIVE) != 0, position, -1)
            tl.store(wide + tokens // 2 + seq, tl.load(row + _LAST))
            tl.store(wide + positions // 2 + seq, position)
            tl.store(packet + kv_lens + seq, (position + 1).to(tl.int32))


def begin_step(
    rows: Tensor, table: Tensor, packet: Tensor, page_table: Tensor, num_tokens: int, num_seqs: int, num_rows: int,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """Do ``begin_step`` in one launch; nothing comes back to the host. Shapes: as ``begin_step``."""
    at = sections(StepShape(num_tokens, num_seqs, num_rows))
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    wide = packet.view(torch.int64)
    _begin[(num_seqs, triton.cdiv(width, block))](
        rows, table, packet, wide, page_table, width, at.slots, at.kv_lens, at.page_first, at.page_count,
        at.page_at, at.admission_at, at.token_ids, at.positions, BLOCK=block, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
