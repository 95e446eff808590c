"""Arguments of latent attention over pages, with NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


REAL_BATCHES = {
    "one decode": ([1000], [1], 0),
    "decodes": ([1000, 17, 4000, 1], [1, 1, 1, 1], 0),
    "dead and padded decodes": ([64, 0, 4000, 0], [1, 1, 1, 1], 3),
    "chunks": ([700, 1000, 64, 33], [700, 1, 64, 1], 9),
    "chunk over a history": ([9000], [40], 0),
    "ragged": ([20000, 500, 6000, 3000], [11, 1, 130, 1], 0),
}
"""kv lengths, queries, and rows past the last sequence"""
CAPTURED = [([1, 1, 1, 1], [1, 1, 0, 0]), ([40, 1, 1, 0], [1, 20, 0, 5]), ([1, 20, 0, 25], [40, 1, 1, 0])]
"""queries of the sequences of a step when it is captured, and when it is replayed"""


def history(
    lengths: list[int], k_dim: int, dtype: torch.dtype, page_tokens: int = 16
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(arena, table, keys of each sequence) on the GPU: pages in random order, NaN where no token lies.

    The first page begins 3 x 256 bytes into the arena, and nothing lies behind the last one.
    """
    random = torch.Generator("cuda").manual_seed(0)
    counts = [-(-length // page_tokens) for length in lengths]
    page = torch.randn(1 + sum(counts), page_tokens, k_dim, generator=random, device="cuda").to(dtype)
    page[0] = float("nan")
    order = torch.randperm(sum(counts), generator=random, device="cuda") + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    keys = []
    for sequence, (pages, length) in enumerate(zip(order.split(counts), lengths)):
        table[sequence, : len(pages)] = 3 + pages * (page[0].nbytes // 256)
        keys.append(page[pages].flatten(0, 1)[:length])
        if length:
            page[pages[-1], length - page_tokens * (len(pages) - 1) :] = float("nan")
    nothing = torch.full((3 * 256,), 0xFF, dtype=torch.uint8, device="cuda")
    return torch.cat([nothing, page.view(-1).view(torch.uint8)]), table, keys


def exact(
    q: torch.Tensor, keys: torch.Tensor, scale: float, v_dim: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of the last tokens of a sequence, in float64, by blocks of queries; zeros without any key."""
    if not len(keys):
        return torch.zeros(*q.shape[:2], v_dim, dtype=torch.float64, device=q.device)
    blocks = []
    keys = keys.double()
    for block in torch.arange(len(q), device="cuda").split(64):
        at = len(keys) - len(q) + block[:, None, None]
        logits = torch.einsum("thd,sd->ths", q[block].double(), keys) * scale
        logits = logits.masked_fill(torch.arange(len(keys), device="cuda") > at, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[None, :, None].expand(len(block), -1, 1)], -1)
        blocks.append(logits.softmax(-1)[..., : len(keys)] @ keys[:, :v_dim])
    return torch.cat(blocks)


def check_real(
    attend: Callable[..., torch.Tensor], batch: str, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype,
    page_tokens: int = 16, sinks: bool = False, **options: object,
) -> None:  # fmt: skip
    """Compare a kernel's result on the GPU with the exact one, in a step of a realistic size."""
    lengths, counts, padding = REAL_BATCHES[batch]
    arena, table, keys = history(lengths, k_dim, dtype, page_tokens)
    q = torch.randn(sum(counts) + padding, heads, k_dim, device="cuda").to(dtype)
    sink = torch.randn(heads, device="cuda").to(dtype) if sinks else None
    meta = (starts(counts).cuda(), torch.tensor(lengths, dtype=torch.int32).cuda(), torch.tensor(0).cuda())
    got = attend(q, arena, table, *meta, sink, page_tokens, k_dim**-0.5, v_dim, **options)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for mine, queries, each in zip(got.split([*counts, padding]), q.split([*counts, padding]), keys):
        expected = exact(queries, each, k_dim**-0.5, v_dim, sink).to(dtype)
        torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance)
    assert not got[sum(counts) :].any()


def check_captured(
    attend: Callable[..., torch.Tensor], batches: tuple[list[int], list[int]], heads: int
) -> None:  # fmt: skip
    """Capture a step on the GPU with some lengths, replay it with others and compare with the exact result."""
    first, second = batches
    arena, table, keys = history([9000, 900, 77, 2000], 576, torch.bfloat16)
    q = torch.randn(sum(first), heads, 576, device="cuda").bfloat16()
    q_starts, kv_lens = starts(first).cuda(), torch.tensor([100, 900, 77, 0], dtype=torch.int32).cuda()
    rest = (torch.tensor(0).cuda(), None, 16, 0.05, 512)

    def step() -> torch.Tensor:
        return attend(q, arena, table, q_starts, kv_lens, *rest, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.normal_()
    q_starts.copy_(starts(second))
    kv_lens.copy_(torch.tensor([9000, 850, 0, 1999]))
    graph.replay()
    assert torch.isfinite(out).all()
    for sequence, (count, length) in enumerate(zip(second, kv_lens.tolist())):
        rows = slice(int(q_starts[sequence]), int(q_starts[sequence + 1]))
        if count and length:
            expected = exact(q[rows], keys[sequence][:length], 0.05, 512).bfloat16()
            torch.testing.assert_close(out[rows], expected, atol=2e-2, rtol=2e-2)
        else:
            assert not out[rows].any()
    assert not out[sum(second) :].any()
