"""begin_step: what the host sent is taken into the slots, and what decodes need comes out of them.

    packet's admissions -> rows of slots; packet's pages -> page table rows
    sequence b of slot s:  page_tables[:, b] = table[s], blocks[b] = block[s]
    decode b of slot s:  token = last_token[s], position = active[s] ? position[s] : -1, kv_len = position + 1

A sequence that the device has ended is still in the next step; with position -1 its row is dead. All news concerns
sequences of the step, so that each sequence is done apart. Entries of a table row past its sequence's pages are stale,
but always offsets inside the arena.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.graph.packet import SLOT_WIDTH, Column, Header, StepShape, sections
from treadle.kernels.registry import always, register_reference
from treadle.kernels.triton_kernel import register_triton


def begin_step(
    rows: Tensor, table: Tensor, packet: Tensor, page_tables: Tensor, blocks: Tensor, num_tokens: int, num_seqs: int,
    num_rows: int,
) -> None:  # fmt: skip
    """Change the first five in place.

    Shapes: rows [S, SLOT_WIDTH] int64; table [S, G, M] int32; packet [N] int32; page_tables [G, >= B, M] int32; blocks
    [>= B] int32.
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
            groups = table.shape[1]
            pages = packet[pages_at[seq] : pages_at[seq] + groups * count[seq]].view(groups, count[seq])
            table[slot, :, first[seq] : first[seq] + count[seq]] = pages
    indices = torch.tensor(slots, device=rows.device)
    for group, chosen in enumerate(page_tables):
        torch.index_select(table[:, group], 0, indices, out=chosen[:num_seqs])
    blocks[:num_seqs] = rows[indices, Column.BLOCK]
    decodes = int(packet[Header.NUM_DECODES])
    if not decodes:
        return
    state = rows[indices[:decodes]]
    position = torch.where(state[:, Column.ACTIVE] != 0, state[:, Column.POSITION], -1)
    wide[at.token_ids // 2 : at.token_ids // 2 + decodes] = state[:, Column.LAST_TOKEN]
    wide[at.positions // 2 : at.positions // 2 + decodes] = position
    packet[at.kv_lens : at.kv_lens + decodes] = (position + 1).int()


register_reference("begin_step", begin_step, inline=False)
register_triton("begin_step", "begin_step_triton", always)
