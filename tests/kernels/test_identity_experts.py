import torch


def test_only_ids_from_the_first_on_count():
    x = torch.randn(3, 8).bfloat16()
    ids = torch.tensor([[0, 4], [5, 4], [1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 4.0]])
    found = torch.ops.treadle.identity_experts(x, weights, ids, 4)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, (x.float() * torch.tensor([[0.25], [3.0], [0.0]])).bfloat16())
