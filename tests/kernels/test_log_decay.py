import torch

from treadle.kernels.log_decay import log_decay

H, D = 3, 4


def test_a_decay_for_each_head():
    x, A, bias = torch.randn(5, H).bfloat16(), -torch.rand(H), torch.randn(H)
    made = log_decay(x, A, bias)
    assert made.dtype is torch.float32
    torch.testing.assert_close(made, A * torch.log1p((x.float() + bias).exp()))


def test_a_decay_for_each_channel_and_a_floor():
    x, A, bias = torch.randn(5, H, D), -torch.rand(H), torch.randn(H, D)
    torch.testing.assert_close(log_decay(x, A, bias), A[:, None] * torch.log1p((x + bias).exp()))
    made = log_decay(x, A, bias, -5.0)
    torch.testing.assert_close(made, -5 * torch.sigmoid(-A[:, None] * (x + bias)))
    assert (made > -5).all()
