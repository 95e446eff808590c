import pytest
import torch
from torch import Tensor

from treadle.kernels import registry

H, K, D, DV, E, PAGE = 4, 2, 8, 6, 5, 4
LENGTHS, COUNTS = (9, 0, 6), (4, 0, 6)


def inputs() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Whole sequences [S, ...], their bias, and the fields of the step that computes their last tokens."""
    torch.manual_seed(0)
    total = sum(COUNTS)
    parts = [torch.randn(total, H, D), torch.randn(total, K, D), torch.randn(total, K, DV), torch.randn(total, H, E)]
    kv = torch.full((3, 12, K, D + DV), torch.nan)
    kv[0, :5] = torch.randn(5, K, D + DV)
    positions = torch.cat([torch.arange(length - count, length) for length, count in zip(LENGTHS, COUNTS)])
    ids = torch.tensor([0] * 4 + [2] * 6, dtype=torch.int32)
    starts = torch.tensor([0, 4, 4, 10], dtype=torch.int32)
    return parts, kv, [ids, positions, starts, torch.tensor(LENGTHS, dtype=torch.int32)]


@pytest.mark.parametrize("window", [0, 3])
def test_a_key_counts_by_what_the_query_makes_of_its_distance(window: int) -> None:
    registry.load_all()
    (q, k, v, bias), kv, steps = inputs()
    made = torch.ops.treadle.relative_attention(q, k, v, bias, kv, *steps, 0.3, window)
    ids, positions = steps[0].tolist(), steps[1].tolist()
    for t, (sequence, position) in enumerate(zip(ids, positions)):
        first = max(0, position - window + 1) if window else 0
        for head in range(H):
            rows = kv[sequence, first : position + 1, head // (H // K)]
            logits = rows[:, :D] @ q[t, head] * 0.3
            for i, place in enumerate(range(first, position + 1)):
                if position - place < E:
                    logits[i] += bias[t, head, position - place]
            torch.testing.assert_close(made[t, head], logits.softmax(0) @ rows[:, D:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_over_pages_it_is_the_same_and_pages_out_of_sight_are_not_read(window: int) -> None:
    registry.load_all()
    (q, k, v, bias), kv, steps = inputs()
    expected = torch.ops.treadle.relative_attention(q, k, v, bias, kv, *steps, 0.3, window)
    page_bytes = K * (D + DV) * PAGE * 4
    units = -(-page_bytes // 256)
    arena = torch.full((10 * units * 256,), 0xFF, dtype=torch.uint8)
    table = (torch.arange(9, dtype=torch.int32).view(3, 3) + 1) * units
    offset = torch.tensor([0])
    for sequence, length in enumerate(LENGTHS):
        rows = kv[sequence, :length]
        where = (torch.full((length,), sequence, dtype=torch.int32), torch.arange(length))
        torch.ops.treadle.cache_write(rows[..., :D], rows[..., D:], arena, table, *where, offset, PAGE)
    if window:
        table[0, 0] = 0  # tokens 0 .. 3 of a sequence whose first query stands at 5 and sees 3 .. 5
        first = kv[0, 3:4]
        keep = (torch.tensor([0], dtype=torch.int32), torch.tensor([3]))
        torch.ops.treadle.cache_write(first[..., :D], first[..., D:], arena, table, *keep, offset, PAGE)
    made = torch.ops.treadle.paged_relative_attention(
        q, bias, arena, table, steps[2], steps[3], offset, PAGE, K, DV, 0.3, window
    )
    torch.testing.assert_close(made, expected)
