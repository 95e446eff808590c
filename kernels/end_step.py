"""end_step: the sampled tokens are noted in the slots; a sequence that they end is inactive from then on.

A row runs if its slot is active, or if it is the last chunk of a prompt. Of a running row: last_token = token,
position and token_index grow by one, remaining and min_left shrink; it ends by a stop token, by its length, or by an
error (token -1). Rows past the header's NUM_ROWS are padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.graph.packet import MAX_STOPS, SLOT_WIDTH, Column, Header, StepShape, sections
from treadle.kernels.registry import Kernel, define_opaque, register, register_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # a platform without it has references
    triton = None

if TYPE_CHECKING:
    from treadle.graph.target import Target


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

if triton is not None:
    _WIDTH = tl.constexpr(SLOT_WIDTH)
    _STOPS = tl.constexpr(int(Column.STOPS))
    _NUM_STOPS = tl.constexpr(MAX_STOPS)
    _ACTIVE, _LAST, _POSITION, _INDEX, _REMAINING, _MIN_LEFT = (
        tl.constexpr(int(column))
        for column in (
            Column.ACTIVE,
            Column.LAST_TOKEN,
            Column.POSITION,
            Column.TOKEN_INDEX,
            Column.REMAINING,
            Column.MIN_LEFT,
        )
    )
    _NUM_DECODES, _NUM_ROWS = tl.constexpr(int(Header.NUM_DECODES)), tl.constexpr(int(Header.NUM_ROWS))

    @triton.jit(do_not_specialize=["slots"])
    def _end(rows, packet, wide, sampled, out, slots):
        index = tl.program_id(0)
        if index < tl.load(packet + _NUM_ROWS):
            token = tl.load(sampled + index)
            row = rows + tl.load(wide + slots // 2 + index) * _WIDTH
            active = tl.load(row + _ACTIVE)
            running = (active != 0) | (index >= tl.load(packet + _NUM_DECODES))
            step = running.to(tl.int64)
            stops = tl.load(row + _STOPS + tl.arange(0, _NUM_STOPS))
            hits = tl.sum((stops == token).to(tl.int32), 0)
            remaining = tl.load(row + _REMAINING) - step
            ended = (hits > 0) | (remaining <= 0) | (token < 0)
            last = tl.load(row + _LAST)
            tl.store(row + _LAST, tl.where(running, tl.maximum(token, 0), last))
            tl.store(row + _ACTIVE, (running & (ended == 0)).to(tl.int64))
            tl.store(row + _POSITION, tl.load(row + _POSITION) + step)
            tl.store(row + _INDEX, tl.load(row + _INDEX) + step)
            tl.store(row + _REMAINING, remaining)
            tl.store(row + _MIN_LEFT, tl.load(row + _MIN_LEFT) - step)
            tl.store(out + index, token)

    def end_step_triton(
        rows: Tensor, packet: Tensor, sampled: Tensor, out: Tensor, num_tokens: int, num_seqs: int, num_rows: int
    ) -> None:
        """Do ``end_step`` in one launch. Shapes: as ``end_step``."""
        at = sections(StepShape(num_tokens, num_seqs, num_rows))
        wide = packet.view(torch.int64)
        _end[(num_rows,)](rows, packet, wide, sampled, out, at.sample_slots, num_warps=1)

    def _supports(target: Target, _: Mapping[str, Any]) -> bool:
        return target.device == "cuda"

    register(
        Kernel(
            op="end_step",
            name="end_step.triton",
            function=define_opaque("end_step", "triton", end_step_triton, "cuda"),
            inline=False,
            supports=_supports,
            priority=10,
        )
    )
