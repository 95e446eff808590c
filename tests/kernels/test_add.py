import torch

from treadle.kernels.add import add


def test_the_weighted_sum():
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(torch.ops.treadle.add(a, b, 0.5, -2.0), a / 2 - 2 * b)
    assert torch.equal(torch.ops.treadle.add(a, b), a + b)


def test_the_product_is_rounded_before_the_sum():
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(add(a, b, beta=0.22), a + (b.float() * 0.22).bfloat16())
    assert not torch.equal(add(a, b, beta=0.22), (a.float() + b.float() * 0.22).bfloat16())
