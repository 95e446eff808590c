"""The Triton kernel of latent_write: one program for a token's row.

With PDL the step's metadata is read before the kernel waits for its predecessor; cache_write_triton says why that is
safe.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from treadle.graph.state import UNIT_BYTES
from treadle.kernels.cache_write_triton import alignment
from treadle.kernels.skinny import launch_options


@triton.jit(do_not_specialize=["table_stride"])
def write_row(  # type: ignore[no-untyped-def]
    k, arena, page_table, seq_ids, positions, layer_offset, k_stride, table_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    live = position >= 0
    position = tl.maximum(position, 0)
    page = tl.load(page_table + tl.load(seq_ids + token) * table_stride + position // PAGE, mask=live, other=0)
    offset = tl.multiple_of(tl.load(layer_offset) // (256 // UNIT), ALIGNMENT)
    target = arena + (page.to(tl.int64) * UNIT + offset + position % PAGE * DIM)
    channel = tl.arange(0, BLOCK)
    inside = channel < tl.where(live, DIM, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(k + token * k_stride + channel, mask=inside)
    tl.store(target + channel, row, mask=inside)


def latent_write(
    k: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
    *,
    pdl: bool = False,
    invariant: bool = False,  # noqa: ARG001  (a row is copied alike in every step)
) -> None:
    """Write ``k`` into the arena. Shapes: as the reference."""
    assert page_table.dtype is seq_ids.dtype is torch.int32
    assert positions.dtype is layer_offset.dtype is torch.int64
    k = k if k.stride(1) == 1 else k.contiguous()
    tokens, dim = k.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(dim)
    write_row[(tokens,)](
        k,
        arena.view(k.dtype),
        page_table,
        seq_ids,
        positions,
        layer_offset,
        k.stride(0),
        page_table.stride(0),
        DIM=dim,
        BLOCK=block,
        PAGE=page_tokens,
        UNIT=UNIT_BYTES // k.element_size(),
        ALIGNMENT=alignment(k.element_size(), page_tokens, dim),
        PDL=pdl,
        num_warps=4 if block > 256 else 1,
        **launch_options(pdl),
    )
