"""Which blocks are chosen, against the reference: interpreted here, natively on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import Pages
from side_keys import arguments
from torch import Tensor
from triton_mode import DEVICES

from treadle.kernels.block_attention import choose_blocks as reference
from treadle.kernels.block_choice_triton import choose_blocks


def chosen(device: str, args: tuple[Any, ...], **options: int) -> Tensor:
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in args]
    _, index_q, arena, table, q_starts, kv_lens, _, keys_offset, page_tokens, _, _, _, *choice = moved
    return choose_blocks(
        index_q, arena, table, q_starts, kv_lens, keys_offset, page_tokens, *choice, **options
    ).cpu()  # fmt: skip


def side_keys(args: tuple[Any, ...], pages: Pages, sequence: int, length: int, dim: int) -> Tensor:
    parts = []
    for page in range(-(-length // pages.page_tokens)):
        start = int(pages.table[sequence, page]) * 256
        size = pages.page_tokens * dim * pages.dtype.itemsize
        parts.append(args[2][start : start + size].view(pages.dtype).view(-1, dim))
    return torch.cat(parts)[:length]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "block", "topk", "local", "heads"),
    [
        (torch.float32, 3, 4, 2, 2),
        (torch.float16, 20, 2, 1, 4),
        (torch.bfloat16, 20, 2, 1, 4),
        (torch.bfloat16, 100, 16, 1, 1),
        (torch.float16, 4, 1, 1, 3),
        (torch.float32, 12, 3, 0, 20),
    ],
)
def test_the_same_blocks_as_in_the_reference(
    device: str, dtype: torch.dtype, block: int, topk: int, local: int, heads: int
) -> None:
    lengths, counts, dim = [50, 0, 3, 31], [9, 2, 3, 1], 5
    pages = Pages(lengths, 1, 16, 8, 8, dtype)
    args = arguments(pages, lengths, counts, heads, heads, dim, block, topk, local, padding=2)
    made = chosen(device, args)
    assert torch.equal(chosen(device, args, choice_bytes=5000), made)
    assert made.dtype is torch.int32
    assert made.shape == (17, heads, topk)
    row = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts)):
        if length:
            places = torch.arange(length - count, length)
            keys = side_keys(args, pages, sequence, length, dim)
            seen = reference(args[1][row : row + count], keys, places, block, topk, local)
            for i, head in torch.cartesian_prod(torch.arange(count), torch.arange(heads)).tolist():
                expected = sorted({place // block for place in seen[head, i].nonzero().flatten().tolist()})
                assert made[row + i, head].tolist() == expected + [-1] * (topk - len(expected))
        else:
            assert made[row : row + count].eq(-1).all()
        row += count
    assert made[row:].eq(-1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_scores_the_latest_blocks_are_chosen(device: str) -> None:
    args = list(arguments(Pages([12], 1, 8, 8, 4, torch.float32), [12], [2], 1, 1, 4, 2, 3, 0))
    args[1] = torch.zeros_like(args[1])
    assert chosen(device, tuple(args)).tolist() == [[[3, 4, 5]]] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_score_that_is_no_number_is_not_chosen(device: str) -> None:
    args = list(arguments(Pages([12], 1, 8, 8, 4, torch.float32), [12], [1], 1, 1, 4, 2, 3, 0))
    args[1] = torch.full_like(args[1], torch.nan)
    assert chosen(device, tuple(args)).tolist() == [[[-1, -1, -1]]]
