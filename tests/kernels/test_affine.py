import torch


def test_each_step_alone_and_all_in_order():
    x = torch.linspace(-9, 9, 101)
    affine = torch.ops.treadle.affine
    assert torch.equal(affine(x, 0.5), x * 0.5)
    torch.testing.assert_close(affine(x, softcap=3.0), 3 * torch.tanh(x / 3))
    assert torch.equal(affine(x, clip=2.0), x.clamp(-2, 2))
    torch.testing.assert_close(affine(x, 4.0, 3.0, 2.0), 3 * torch.tanh(x.clamp(-2, 2) * 4 / 3))


def test_low_precision_rounds_each_step_as_gemma2_does():
    x = torch.randn(99).bfloat16() * 20
    assert torch.equal(torch.ops.treadle.affine(x, softcap=30.0), torch.tanh(x / 30.0) * 30.0)


def test_nothing_to_do_is_a_copy():
    x = torch.randn(4)
    y = torch.ops.treadle.affine(x)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
