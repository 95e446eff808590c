import torch

from treadle.kernels.time_step import time_step


def test_steps_are_softplus_within_limits_in_fp32():
    x, bias = torch.randn(5, 3).bfloat16(), torch.randn(3)
    made = time_step(x, bias, 0.4, 0.9)
    assert made.dtype is torch.float32
    torch.testing.assert_close(made, torch.log1p((x.float() + bias).exp()).clamp(0.4, 0.9))
    torch.testing.assert_close(time_step(x, None), torch.log1p(x.float().exp()))
