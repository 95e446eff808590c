import torch
from torch import nn

from treadle.kernels.differential import differential


def test_it_is_the_normed_difference_of_the_halves():
    x, lambdas = torch.randn(3, 4, 6), torch.randn(4, 5) * 0.3
    lq1, lk1, lq2, lk2 = lambdas
    share = (lq1 @ lk1).exp() - (lq2 @ lk2).exp() + 0.3
    norm = nn.RMSNorm(6, eps=1e-3, elementwise_affine=False)
    torch.testing.assert_close(differential(x, *lambdas, 0.3, 1e-3), 0.7 * norm(x[:, :2] - share * x[:, 2:]))
