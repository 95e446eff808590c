"""Keys and values scattered over the pages of an arena, in random order, with NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

UNIT = 256


class Pages:
    """An arena of one layer kind with two layers a page; the layer under test is the second.

    Shapes: history of sequence s: keys[s] [length, K, Dk], values[s] [length, K, Dv].
    """

    def __init__(
        self, lengths: Sequence[int], kv_heads: int, k_dim: int, v_dim: int, page_tokens: int, dtype: torch.dtype,
        seed: int = 0, capacity: int = 0,
    ) -> None:  # fmt: skip
        self.random = torch.Generator().manual_seed(seed)
        self.kv_heads, self.k_dim, self.v_dim, self.page_tokens, self.dtype = kv_heads, k_dim, v_dim, page_tokens, dtype
        item = torch.empty((), dtype=dtype).element_size()
        self.layer_bytes = kv_heads * page_tokens * (k_dim + v_dim) * item
        self.page_bytes = -(-2 * self.layer_bytes // UNIT) * UNIT
        self.layer_offset = torch.tensor(self.layer_bytes)
        counts = [-(-max(length, capacity) // page_tokens) for length in lengths]
        self.arena = torch.full(((1 + sum(counts)) * self.page_bytes,), 0xFF, dtype=torch.uint8)
        order = (torch.randperm(sum(counts), generator=self.random) + 1).tolist()
        self.table = torch.zeros(len(lengths), max(counts, default=1) or 1, dtype=torch.int32)
        for sequence, count in enumerate(counts):
            for page in range(count):
                self.table[sequence, page] = order.pop() * self.page_bytes // UNIT
        self.keys = [self.randn(length, kv_heads, k_dim) for length in lengths]
        self.values = [self.randn(length, kv_heads, v_dim) for length in lengths]
        for sequence, length in enumerate(lengths):
            for position in range(length):
                self.key_view(sequence, position // page_tokens)[:, position % page_tokens] = self.keys[sequence][
                    position
                ]
                self.value_view(sequence, position // page_tokens)[:, position % page_tokens] = self.values[sequence][
                    position
                ]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def key_view(self, sequence: int, page: int) -> Tensor:
        """The keys of one page, [K, page_tokens, Dk]."""
        return self._block(sequence, page, 0, self.k_dim)

    def value_view(self, sequence: int, page: int) -> Tensor:
        """The values of one page, [K, page_tokens, Dv]."""
        return self._block(sequence, page, self.kv_heads * self.page_tokens * self.k_dim, self.v_dim)

    def _block(self, sequence: int, page: int, skip: int, dim: int) -> Tensor:
        start = int(self.table[sequence, page]) * UNIT + int(self.layer_offset)
        flat = self.arena[start : start + self.layer_bytes].view(self.dtype)
        return flat[skip : skip + self.kv_heads * self.page_tokens * dim].view(self.kv_heads, self.page_tokens, dim)


def starts(counts: Sequence[int]) -> Tensor:
    """[B + 1] int32: where each sequence's rows start, if it has ``counts`` rows."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
