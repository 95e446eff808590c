import pytest
import torch
from torch import Tensor

from treadle.kernels import registry
from treadle.kernels.block_attention import choose_blocks

H, K, D, DV, HI, DI, S, PAGE = 4, 2, 8, 6, 2, 5, 22, 4
TAIL = (0.3, 3, 3, 1)


def inputs() -> list[Tensor]:
    torch.manual_seed(2)
    shapes = ((S, H, D), (S, K, D), (S, K, DV), (S, HI, DI), (S, DI))
    return [torch.randn(shape) for shape in shapes]


def run(cuts: list[int]) -> Tensor:
    registry.load_all()
    kv, keys = torch.full((1, 32, K, D + DV), torch.nan), torch.full((1, 32, 1, DI), torch.nan)
    made, start = [], 0
    for count in cuts:
        rows = [t[start : start + count] for t in inputs()]
        steps = (
            torch.zeros(count, dtype=torch.int32), torch.arange(start, start + count),
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([start + count], dtype=torch.int32),
        )  # fmt: skip
        made.append(torch.ops.treadle.block_attention(*rows, kv, keys, *steps, *TAIL))
        start += count
    return torch.cat(made)


def test_a_query_sees_the_best_blocks_and_the_last() -> None:
    q, k, v, index_q, index_k = inputs()
    made = run([S])
    for t in (0, 2, 10, 21):
        for head in range(H):
            scores = index_k[: t + 1] @ index_q[t, head // (H // HI)]
            best = [float(part.max()) for part in scores.split(3)]
            best[t // 3] = float("inf")
            chosen = sorted(range(len(best)), key=lambda b: -best[b])[:3]
            rows = torch.tensor([j for j in range(t + 1) if j // 3 in chosen])
            logits = k[rows, head // (H // K)] @ q[t, head] * 0.3
            expected = logits.softmax(0) @ v[rows, head // (H // K)]
            torch.testing.assert_close(made[t, head], expected, rtol=1e-4, atol=1e-5)


def test_cut_anywhere_it_is_the_attention_of_the_whole() -> None:
    torch.testing.assert_close(run([1, 9, 1, 1, 7, 3]), run([S]))


@pytest.mark.parametrize("local", [0, 2])
def test_blocks_ahead_are_never_chosen(local: int) -> None:
    visible = choose_blocks(torch.randn(5, HI, DI), torch.randn(5, DI), torch.arange(5), 2, 9, local)
    assert torch.equal(visible, torch.ones(HI, 5, 5, dtype=torch.bool).tril())


def test_over_pages_it_is_the_same() -> None:
    q, k, v, index_q, index_k = inputs()
    expected = run([S])
    kv_bytes = -(-K * (D + DV) * PAGE * 4 // 256) * 256
    units = (kv_bytes + -(-DI * PAGE * 4 // 256) * 256) // 256
    arena = torch.full((8 * units * 256,), 0xFF, dtype=torch.uint8)
    table = torch.arange(1, 7, dtype=torch.int32).flip(0).view(1, -1) * units
    offsets = (torch.tensor([0]), torch.tensor([kv_bytes]))
    where = (torch.zeros(S, dtype=torch.int32), torch.arange(S))
    torch.ops.treadle.cache_write(k, v, arena, table, *where, offsets[0], PAGE)
    torch.ops.treadle.latent_write(index_k, arena, table, *where, offsets[1], PAGE)
    made = torch.ops.treadle.paged_block_attention(
        q, index_q, arena, table, torch.tensor([0, S], dtype=torch.int32), torch.tensor([S], dtype=torch.int32),
        *offsets, PAGE, K, DV, *TAIL,
    )  # fmt: skip
    torch.testing.assert_close(made, expected)
