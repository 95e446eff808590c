"""begin_step: what the host sent is taken into the slots, and what decodes need comes out of them.

    packet's admissions -> rows of slots; packet's pages -> page table rows
    decode b of slot s:  token = last_token[s], position = active[s] ? position[s] : -1, kv_len = position + 1

A sequence that the device has ended is still in the next step; with position -1 its row is dead. All news concerns
sequences of the step, so that each sequence is done apart. Entries of a table row past its sequence's pages are stale,
but always offsets inside the arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.graph.packet import SLOT_WIDTH, Column, Header, StepShape, sections
from treadle.kernels.registry import Kernel, define_opaque, register, register_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # a platform without it has references
    triton = None

if TYPE_CHECKING:
    from treadle.graph.target import Target


def begin_step(
    rows: Tensor, table: Tensor, packet: Tensor, page_table: Tensor, num_tokens: int, num_seqs: int, num_rows: int
) -> None:
    """Change all four in place.

    Shapes: rows [S, SLOT_WIDTH] int64; table [S, M] int32; packet [N] int32; page_table [>= B, M] int32.
    """
    at = sections(StepShape(num_tokens, num_seqs, num_rows))
    wide = packet.view(torch.int64)
    slots = packet[at.slots : at.slots + num_seqs].tolist()
    first, count, pages_at, new_at = (
        packet[begin : begin + num_seqs].tolist()
        for begin in (at.page_first, at.page_count, at.page_at, at.admission_at)
    )
    for seq, slot in enumerate(slots):
        if new_at[seq] >= 0:
            rows[slot] = wide[new_at[seq] // 2 : new_at[seq] // 2 + SLOT_WIDTH]
        if count[seq]:
            pages = packet[pages_at[seq] : pages_at[seq] + count[seq]]
            table[slot, first[seq] : first[seq] + count[seq]] = pages
    indices = torch.tensor(slots, device=rows.device)
    torch.index_select(table, 0, indices, out=page_table[:num_seqs])
    decodes = int(packet[Header.NUM_DECODES])
    if not decodes:
        return
    state = rows[indices[:decodes]]
    position = torch.where(state[:, Column.ACTIVE] != 0, state[:, Column.POSITION], -1)
    wide[at.token_ids // 2 : at.token_ids // 2 + decodes] = state[:, Column.LAST_TOKEN]
    wide[at.positions // 2 : at.positions // 2 + decodes] = position
    packet[at.kv_lens : at.kv_lens + decodes] = (position + 1).int()


register_reference("begin_step", begin_step, inline=False)

if triton is not None:
    _WIDTH = tl.constexpr(SLOT_WIDTH)
    _WIDTH_P2 = tl.constexpr(triton.next_power_of_2(SLOT_WIDTH))
    _ACTIVE, _POSITION, _LAST = (
        tl.constexpr(int(column)) for column in (Column.ACTIVE, Column.POSITION, Column.LAST_TOKEN)
    )
    _NUM_DECODES = tl.constexpr(int(Header.NUM_DECODES))

    # One program a sequence and block of its table row. Sizes change with the step: no version is made for any of them.
    @triton.jit(do_not_specialize=["width", "slots", "kv_lens", "first", "count", "at", "new", "tokens", "positions"])
    def _begin(
        rows, table, packet, wide, page_table, width, slots, kv_lens, first, count, at, new, tokens, positions,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        seq = tl.program_id(0)
        slot = tl.load(packet + slots + seq).to(tl.int64)
        entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = entries < width
        begin = tl.load(packet + first + seq)
        pages = tl.load(packet + count + seq)
        is_new = (entries >= begin) & (entries < begin + pages) & inside
        fresh = tl.load(packet + tl.load(packet + at + seq) + entries - begin, mask=is_new, other=0)
        known = tl.load(table + slot * width + entries, mask=inside & (is_new == 0), other=0)
        tl.store(table + slot * width + entries, fresh, mask=is_new)
        tl.store(page_table + seq.to(tl.int64) * width + entries, tl.where(is_new, fresh, known), mask=inside)
        if tl.program_id(1) == 0:
            content = tl.load(packet + new + seq)
            columns = tl.arange(0, _WIDTH_P2)
            admitted = (content >= 0) & (columns < _WIDTH)
            row = rows + slot * _WIDTH
            tl.store(row + columns, tl.load(wide + content // 2 + columns, mask=admitted, other=0), mask=admitted)
            if seq < tl.load(packet + _NUM_DECODES):
                position = tl.load(row + _POSITION)
                position = tl.where(tl.load(row + _ACTIVE) != 0, position, -1)
                tl.store(wide + tokens // 2 + seq, tl.load(row + _LAST))
                tl.store(wide + positions // 2 + seq, position)
                tl.store(packet + kv_lens + seq, (position + 1).to(tl.int32))

    def begin_step_triton(
        rows: Tensor, table: Tensor, packet: Tensor, page_table: Tensor, num_tokens: int, num_seqs: int, num_rows: int
    ) -> None:
        """Do ``begin_step`` in one launch; nothing comes back to the host. Shapes: as ``begin_step``."""
        at = sections(StepShape(num_tokens, num_seqs, num_rows))
        width = table.shape[1]
        block = min(1024, triton.next_power_of_2(width))
        wide = packet.view(torch.int64)
        _begin[(num_seqs, triton.cdiv(width, block))](
            rows, table, packet, wide, page_table, width, at.slots, at.kv_lens, at.page_first, at.page_count,
            at.page_at, at.admission_at, at.token_ids, at.positions, BLOCK=block, num_warps=4,
        )  # fmt: skip

    def _supports(target: Target, _: Mapping[str, Any]) -> bool:
        return target.device == "cuda"

    register(
        Kernel(
            op="begin_step",
            name="begin_step.triton",
            function=define_opaque("begin_step", "triton", begin_step_triton, "cuda"),
            inline=False,
            supports=_supports,
            priority=10,
        )
    )
