import pytest
import torch
from torch import Tensor

from treadle.graph.rope import rope_rows
from treadle.graph.spec import RopeTable
from treadle.kernels import registry
from treadle.kernels.compressed_attention import compress

H, D, HI, DI, S, PAGE = 3, 8, 5, 6, 23, 4
TABLE = rope_rows(RopeTable(dim=4, theta=50.0), 32)


def arguments(overlap: bool, topk: int) -> tuple[Tensor, Tensor, list[object]]:
    """Queries and rows of one sequence, and what follows the fields of a step: sinks up to eps."""
    torch.manual_seed(3)
    rate, halves = (3, 2) if overlap else (5, 1)
    width = D + 2 * D * halves + (2 * DI * halves if topk else 0)
    index = (torch.randn(rate, DI * halves), torch.randn(DI)) if topk else (None, None)
    fixed = [torch.randn(H), torch.randn(rate, D * halves), torch.randn(D), TABLE]
    return torch.randn(S, H, D), torch.randn(S, width), [*fixed, *index, rate, overlap, topk, 4, 0.3, 1e-2]


def run(q: Tensor, rows: Tensor, rest: list[object], cuts: list[int], topk: int) -> Tensor:
    registry.load_all()
    generator = torch.Generator().manual_seed(9)
    index_q, weights = torch.randn(S, HI, DI, generator=generator), torch.rand(S, HI, generator=generator)
    kv, made, start = torch.full((1, 32, 1, rows.shape[1]), torch.nan), [], 0
    for count in cuts:
        at = slice(start, start + count)
        steps = (
            torch.zeros(count, dtype=torch.int32), torch.arange(start, start + count),
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([start + count], dtype=torch.int32),
        )  # fmt: skip
        chosen = (index_q[at], weights[at]) if topk else (None, None)
        made.append(torch.ops.treadle.compressed_attention(q[at], rows[at], kv, *steps, *rest[:4], *chosen, *rest[4:]))
        start += count
    return torch.cat(made)


@pytest.mark.parametrize(("overlap", "topk"), [(False, 0), (True, 0), (True, 2)])
def test_cut_anywhere_it_is_the_attention_of_the_whole(overlap: bool, topk: int) -> None:
    q, rows, rest = arguments(overlap, topk)
    whole = run(q, rows, rest, [S], topk)
    torch.testing.assert_close(run(q, rows, rest, [1, 7, 1, 1, 9, 4], topk), whole)


def test_a_token_sees_its_window_the_closed_spans_and_the_sink() -> None:
    q, rows, rest = arguments(False, 0)
    sinks, ape, norm = rest[:3]
    assert isinstance(sinks, Tensor)
    assert isinstance(ape, Tensor)
    assert isinstance(norm, Tensor)
    made = run(q, rows, rest, [S], 0)
    every = compress(rows[:, D : 2 * D], rows[:, 2 * D :], ape, norm, TABLE, 5, False, 1e-2)
    for t in (3, 4, 13, 22):
        keys = torch.cat([rows[max(0, t - 3) : t + 1, :D], every[: (t + 1) // 5]])
        for head in range(H):
            logits = torch.cat([keys @ q[t, head] * 0.3, sinks[head : head + 1]])
            torch.testing.assert_close(made[t, head], logits.softmax(0)[:-1] @ keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("overlap", "topk"), [(False, 0), (True, 2)])
def test_over_pages_it_is_the_same(overlap: bool, topk: int) -> None:
    q, rows, rest = arguments(overlap, topk)
    expected = run(q, rows, rest, [S], topk)
    units = -(-rows.shape[1] * PAGE * 4 // 256)
    arena = torch.full((8 * units * 256,), 0xFF, dtype=torch.uint8)
    table = torch.arange(1, 7, dtype=torch.int32).flip(0).view(1, -1) * units
    offset = torch.tensor([0])
    where = (torch.zeros(S, dtype=torch.int32), torch.arange(S))
    torch.ops.treadle.latent_write(rows, arena, table, *where, offset, PAGE)
    generator = torch.Generator().manual_seed(9)
    index_q, weights = torch.randn(S, HI, DI, generator=generator), torch.rand(S, HI, generator=generator)
    chosen = (index_q, weights) if topk else (None, None)
    made = torch.ops.treadle.paged_compressed_attention(
        q, arena, table, torch.tensor([0, S], dtype=torch.int32), torch.tensor([S], dtype=torch.int32), offset, PAGE,
        rows.shape[1], *rest[:4], *chosen, *rest[4:],
    )  # fmt: skip
    torch.testing.assert_close(made, expected)
