import torch

from treadle.kernels.index_select import choose, highest, index_select


def test_the_highest_are_chosen_and_listed_in_order():
    scores = torch.tensor([[1.0, 5.0, 3.0, 4.0], [2.0, 2.0, 2.0, 9.0], [7.0, float("-inf"), 8.0, float("-inf")]])
    assert highest(scores, 2).tolist() == [[1, 3], [0, 3], [0, 2]]
    assert highest(scores, 3).tolist() == [[1, 2, 3], [0, 1, 3], [0, 2, -1]]
    assert highest(scores, 6)[0].tolist() == [0, 1, 2, 3, -1, -1]


def test_scores_are_weighted_sums_of_what_is_positive():
    q, keys, weights = torch.randn(3, 4, 8), torch.randn(9, 8), torch.randn(3, 4)
    positions = torch.tensor([2, 6, 8])
    chosen = choose(q, weights, keys, positions, 3)
    for row, position in enumerate(positions.tolist()):
        scores = [float((weights[row] * (q[row] @ key).clamp(min=0)).sum()) for key in keys[: position + 1]]
        best = sorted(sorted(range(position + 1), key=lambda j: -scores[j])[:3])
        assert chosen[row].tolist() == best


def test_keys_are_kept_and_dead_rows_choose_nothing():
    keys = torch.full((2, 10, 1, 8), torch.nan)
    q, k, weights = torch.randn(4, 2, 8), torch.randn(4, 8), torch.randn(4, 2)
    positions, seq_ids = torch.tensor([0, 1, -1, -1]), torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    q_starts, kv_lens = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    chosen = index_select(q, k, weights, keys, seq_ids, positions, q_starts, kv_lens, 3)
    assert chosen.tolist() == [[0, -1, -1], [0, 1, -1], [-1] * 3, [-1] * 3]
    assert torch.equal(keys[0, :2, 0], k[:2])
    assert keys[1].isnan().all()
