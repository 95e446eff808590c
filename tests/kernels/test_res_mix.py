import torch

from treadle.kernels.res_mix import res_mix


def test_entries_count_by_a_softmax_over_their_normed_products() -> None:
    bank, x, norm, project = torch.randn(3, 2, 8), torch.randn(3, 8), torch.randn(8), torch.randn(1, 8)
    made = res_mix(bank, x, norm, project, 1e-2)
    for t in range(3):
        entries = [bank[t, 0], bank[t, 1], x[t]]
        scores = [(norm * project[0]) @ (e / torch.sqrt(e.square().mean() + 1e-2)) for e in entries]
        shares = torch.stack(scores).softmax(0)
        torch.testing.assert_close(made[t], sum(share * entry for share, entry in zip(shares, entries)))
    assert res_mix(bank.bfloat16(), x.bfloat16(), norm, project, 1e-2).dtype is torch.bfloat16
