"""Launches the Triton kernels of experts: which of them a step needs, and in which blocks.

Every launch of one shape is the same, whatever the ids are: it may be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.graph.expert_rows import blocks_bound
from treadle.kernels import experts_triton as kernels
from treadle.kernels.activation_triton import SPELLINGS
from treadle.kernels.experts_blocks import Blocks, Tile, choose, choose_invariant
from treadle.kernels.experts_order_triton import group_pairs
from treadle.kernels.skinny import launch_options

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WIDE = 64
"""From so many rows on, blocks of pairs are the rows of the matrix units; below, weights are."""


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    act: str = "silu",
    gated: bool = True,
    limit: float = 0.0,
    alpha: float = 1.702,
    beta: float = 0.0,
    linear_beta: float = 0.0,
    weigh_input: bool = False,
    *,
    pdl: bool = False,
    invariant: bool = False,
    blocks: Blocks | None = None,
) -> Tensor:
    """Return ``experts``' result, contiguous; ``blocks`` replace those that would be chosen.

    ``invariant``: in blocks that do not depend on the number of tokens.

    Shapes: as the reference's.
    """
    number, hidden, intermediate = down.shape
    tokens, top_k = ids.shape
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    if top_k == 0:
        return y.zero_()
    call = _Call(
        x=x if x.stride(-1) == 1 else x.contiguous(),
        weights=weights.contiguous(),
        ids=ids.contiguous(),
        up=up.contiguous(),
        up_bias=None if up_bias is None else up_bias.contiguous(),
        down=down.contiguous(),
        down_bias=None if down_bias is None else down_bias.contiguous(),
        numbers=(limit or math.inf, alpha, beta, linear_beta),
        constants={"ACT": SPELLINGS.get(act, act), "GATED": gated},
        weigh_input=weigh_input,
        pdl=pdl,
    )
    if invariant:
        blocks = choose_invariant(hidden, intermediate, x.dtype)
    blocks = blocks or choose(hidden, intermediate, number, top_k, tokens, x.dtype)
    if blocks.way == "vector":
        call.vector(blocks, y)
    else:
        call.in_blocks(blocks, y)
    return y


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments of one call, dense, and what all its launches share."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    numbers: tuple[float, float, float, float]
    """limit, alpha, beta, linear_beta"""
    constants: dict[str, Any]
    """of the activation"""
    weigh_input: bool
    pdl: bool

    @property
    def shared(self) -> dict[str, Any]:
        """Constants of every product."""
        return {"WEIGH": self.weigh_input, "PDL": self.pdl, **launch_options(self.pdl)}

    @property
    def hidden_channels(self) -> Tensor:
        """A new tensor for what lies between the two products."""
        return self.x.new_empty((self.ids.numel(), self.down.shape[2]))

    def vector(self, blocks: Blocks, y: Tensor) -> None:
        number, hidden, intermediate = self.down.shape
        tokens, top_k = self.ids.shape
        h = self.hidden_channels
        first, second = blocks.first, blocks.second
        kernels.gate_up_vector[(triton.cdiv(intermediate, first.outputs), tokens * top_k)](
            self.x, self.up, _or(self.up_bias, self.x), self.ids, self.weights, h, self.x.stride(0), top_k,
            number, hidden, intermediate, *self.numbers,
            HAS_BIAS=self.up_bias is not None, WHOLE=first.inputs >= hidden, BN=first.outputs, BK=first.inputs,
            num_warps=first.warps, **self.constants, **self.shared,
        )  # fmt: skip
        kernels.down_vector[(triton.cdiv(hidden, second.outputs), tokens)](
            h, self.down, _or(self.down_bias, h), self.ids, self.weights, y, number, hidden, intermediate,
            K=top_k, KP=triton.next_power_of_2(top_k), HAS_BIAS=self.down_bias is not None,
            WHOLE=second.inputs >= intermediate, BN=second.outputs, BK=second.inputs,
            num_warps=second.warps, **self.shared,
        )  # fmt: skip

    def in_blocks(self, blocks: Blocks, y: Tensor) -> None:
        number, hidden, intermediate = self.down.shape
        tokens, top_k = self.ids.shape
        pairs = tokens * top_k
        ordered = blocks.way == "ordered"
        order = table = self.ids
        count = pairs
        if ordered:
            order, table = group_pairs(self.ids, number, blocks.rows, pdl=self.pdl)
            count = blocks_bound(pairs, number, blocks.rows)
        h = self.hidden_channels
        parts = y if top_k == 1 else y.new_empty((pairs, hidden))
        shared = {
            **self.shared,
            "ORDERED": ordered,
            "GROUP": blocks.group,
            "SWAP": blocks.rows < WIDE,
            # The interpreter's bfloat16 arithmetic is wrong.
            "COMPUTE": tl.float32 if triton.knobs.runtime.interpret else ELEMENTS[h.dtype],
            "BM": blocks.rows,
            "PP": 1 if ordered else triton.next_power_of_2(pairs),
        }
        kernels.gate_up[(count * triton.cdiv(intermediate, blocks.first.outputs),)](
            self.x, self.up, _or(self.up_bias, h), self.ids, self.weights, order, table, h, self.x.stride(0),
            pairs, top_k, count, number, hidden, intermediate, *self.numbers,
            HAS_BIAS=self.up_bias is not None, **_tile(blocks.first, hidden), **self.constants, **shared,
        )  # fmt: skip
        kernels.down[(count * triton.cdiv(hidden, blocks.second.outputs),)](
            h, self.down, _or(self.down_bias, h), self.ids, self.weights, order, table, parts,
            pairs, count, number, hidden, intermediate,
            HAS_BIAS=self.down_bias is not None, **_tile(blocks.second, intermediate), **shared,
        )  # fmt: skip
        if top_k > 1:
            block = min(1024, triton.next_power_of_2(hidden))
            kernels.reduce[(triton.cdiv(hidden, block), tokens)](
                parts, y, hidden, K=top_k, BLOCK=block, PDL=self.pdl, num_warps=4, **launch_options(self.pdl)
            )


def _tile(tile: Tile, width: int) -> dict[str, Any]:
    return {
        "BN": tile.outputs,
        "BK": tile.inputs,
        "EVEN": width % tile.inputs == 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _or(bias: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor that stands where a kernel takes a bias."""
    return other if bias is None else bias
