import torch

from treadle.kernels.multiply import multiply


def test_rows_times_rows_and_rows_times_a_vector():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.equal(multiply(x, y), x * y)
    assert torch.equal(multiply(x, y[0]), torch.stack([row * y[0] for row in x]))
