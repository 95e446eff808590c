"""end_step: the sampled tokens are noted in the slots; a sequence that they end is inactive from then on.

A row runs if its slot is active, or if it is the last chunk of a prompt. Of a running row: last_token = token,
position and token_index grow by one, remaining and min_left shrink; it ends by a stop token, by its length, or by an
error (token -1). Rows past the header's NUM_ROWS are padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.graph.packet import Column, Header, StepShape, sections
from treadle.kernels.registry import always, register_reference
from treadle.kernels.triton_kernel import register_triton


def end_step(
    rows: Tensor, packet: Tensor, sampled: Tensor, out: Tensor, num_tokens: int, num_seqs: int, num_rows: int
) -> None:
    """Change ``rows`` and ``out`` in place.

    Shapes: rows [S, SLOT_WIDTH] int64; packet [N] int32; sampled [R] int64, -1 = none can be; out [>= R] int64.
    """
    at = sections(StepShape(num_tokens, num_seqs, num_rows))
    decodes, count = packet[Header.NUM_DECODES : Header.NUM_ROWS + 1].tolist()
    slots = packet[at.sample_slots : at.sample_slots + 2 * count].view(torch.int64)
    tokens = sampled[:count]
    state = rows[slots]
    running = (state[:, Column.ACTIVE] != 0) | (torch.arange(count, device=rows.device) >= decodes)
    step = running.long()
    # A stop token cannot be drawn while min_tokens forbids it, so that one drawn is one that counts.
    ended = (state[:, Column.STOPS :] == tokens.unsqueeze(1)).any(dim=1) | (tokens < 0)
    ended |= state[:, Column.REMAINING] <= step
    state[:, Column.LAST_TOKEN] = torch.where(running, tokens.clamp_min(0), state[:, Column.LAST_TOKEN])
    state[:, Column.ACTIVE] = (running & ~ended).long()
    for column, sign in (
        (Column.POSITION, 1),
        (Column.TOKEN_INDEX, 1),
        (Column.REMAINING, -1),
        (Column.MIN_LEFT, -1),
    ):
        state[:, column] += sign * step
    rows[slots] = state
    out[:count] = tokens


register_reference("end_step", end_step, inline=False)
register_triton("end_step", "end_step_triton", always)
