"""end_step's Triton kernel: one launch, and nothing that the host must know of what the slots hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.packet import MAX_STOPS, SLOT_WIDTH, Column, Header, StepShape, sections
from treadle.kernels.skinny import launch_options

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
def _end(rows, packet, wide, sampled, out, slots, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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


def end_step(
    rows: Tensor, packet: Tensor, sampled: Tensor, out: Tensor, num_tokens: int, num_seqs: int, num_rows: int,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """Do ``end_step`` in one launch. Shapes: as ``end_step``."""
    at = sections(StepShape(num_tokens, num_seqs, num_rows))
    wide = packet.view(torch.int64)
    _end[(num_rows,)](rows, packet, wide, sampled, out, at.sample_slots, PDL=pdl, num_warps=1, **launch_options(pdl))
