"""Arguments of latent attention over pages, with NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pages import Pages, starts


def latents(lengths: Sequence[int], k_dim: int, page_tokens: int, dtype: torch.dtype, seed: int = 0) -> Pages:
    return Pages(lengths, 1, k_dim, 0, page_tokens, dtype, seed)


def selection(pages: Pages, lengths: Sequence[int], counts: Sequence[int], choices: int, padding: int) -> torch.Tensor:
    """Random keys of the past for each token, ascending, -1 behind them; some tokens choose none."""
    rows = []
    for length, count in zip(lengths, counts):
        for position in range(length - count, length):
            some = torch.randperm(max(position + 1, 0), generator=pages.random)[: choices - position % 3]
            rows.append(torch.nn.functional.pad(some.sort().values, (0, choices - len(some)), value=-1))
    rows += [torch.full((choices,), -1)] * padding
    return torch.stack(rows).to(torch.int32) if rows else torch.zeros(0, choices, dtype=torch.int32)


def arguments(
    pages: Pages, lengths: Sequence[int], counts: Sequence[int], heads: int = 3, v_dim: int = 8, window: int = 0,
    sinks: bool = False, padding: int = 0, choices: int = 0,
) -> tuple[object, ...]:  # fmt: skip
    rows = sum(counts) + padding
    q = pages.randn(rows, heads * pages.k_dim + 8)[:, : heads * pages.k_dim].view(rows, heads, pages.k_dim)
    select = selection(pages, lengths, counts, choices, padding) if choices else None
    return (
        q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset,
        pages.randn(heads) if sinks else None, pages.page_tokens, pages.k_dim**-0.5, v_dim, window, select,
    )  # fmt: skip
