"""Arguments of attention over blocks of keys that side keys choose, with NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pages import UNIT, Pages, starts


def arguments(
    pages: Pages, lengths: Sequence[int], counts: Sequence[int], group: int = 4, index_heads: int = 2, dim: int = 5,
    block: int = 6, topk: int = 4, local: int = 1, padding: int = 0,
) -> tuple[object, ...]:  # fmt: skip
    """Side keys lie where the other layer of a page would have its keys; rows behind the last sequence are NaN.

    They are small whole numbers but for a part by which few keys have the same score: sums are exact in any order.
    """
    rows, heads, width = sum(counts) + padding, pages.kv_heads * group, pages.k_dim
    q = pages.randn(rows, heads * width + 8)[:, : heads * width].view(rows, heads, width)
    index_q = torch.randint(-3, 4, (rows, index_heads, dim), generator=pages.random).to(pages.dtype)
    index_q[..., 0] = 1
    assert dim <= pages.kv_heads * (pages.k_dim + pages.v_dim)
    for sequence, length in enumerate(lengths):
        keys = torch.randint(-3, 4, (length, dim), generator=pages.random).to(pages.dtype)
        keys[:, 0] = (torch.randperm(length, generator=pages.random) % 128 / 128).to(pages.dtype)
        for first in range(0, length, pages.page_tokens):
            start = int(pages.table[sequence, first // pages.page_tokens]) * UNIT
            some = keys[first : first + pages.page_tokens].flatten()
            pages.arena[start : start + some.nbytes] = some.view(torch.uint8)
    q[sum(counts) :], index_q[sum(counts) :] = torch.nan, torch.nan
    return (
        q, index_q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32),
        pages.layer_offset, torch.tensor(0), pages.page_tokens, pages.kv_heads, pages.v_dim, pages.k_dim**-0.5, block,
        topk, local,
    )  # fmt: skip
