import pytest
import torch

from treadle.kernels import registry
from treadle.kernels.linear import SKINNY_TOKENS

CPP = registry.named("linear.cpp").function
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", range(SKINNY_TOKENS + 2))
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (3, 63), (64, 64), (65, 1000), (131, 48)])
def test_cpp_is_the_product(dtype: torch.dtype, tokens: int, outputs: int, width: int):
    x, weight = torch.randn(tokens, width).to(dtype), (torch.randn(outputs, width) / width**0.5).to(dtype)
    tolerance = TOLERANCE[dtype]
    for bias in (None, torch.randn(outputs).to(dtype)):
        y = CPP(x, weight, bias)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact(x, weight, bias), atol=tolerance, rtol=tolerance)


def test_rows_of_any_shape_and_stride():
    weight, bias = torch.randn(5, 16), torch.randn(5)
    for x in (torch.randn(16), torch.randn(2, 3, 16), torch.randn(16, 4).T, torch.randn(4, 30)[:, :16]):
        torch.testing.assert_close(CPP(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    wide = torch.randn(16, 5).T
    x = torch.randn(2, 16)
    torch.testing.assert_close(CPP(x, wide), torch.nn.functional.linear(x, wide))


def test_two_threads_give_the_bits_of_one():
    x, weight = torch.randn(3, 300).bfloat16(), torch.randn(515, 300).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = CPP(x, weight)
        torch.set_num_threads(2)
        assert torch.equal(CPP(x, weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_values_that_are_not_finite_stay_so():
    x, weight = torch.tensor([[float("nan")] * 16, [float("inf")] * 16]).bfloat16(), torch.ones(3, 16).bfloat16()
    y = CPP(x, weight)
    assert y[0].isnan().all()
    assert y[1].isposinf().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("outputs", "width"), [(37, 40), (33, 577)])
def test_a_row_has_the_same_bits_wherever_it_stands(dtype: torch.dtype, outputs: int, width: int):
    invariant = registry.named("linear.cpp_invariant").function
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((41, width), (outputs, width), (outputs,)))
    whole = invariant(x, weight, bias)
    torch.testing.assert_close(whole, CPP(x, weight, bias), atol=0.2, rtol=0.02)
    for count in range(1, 42):
        for first in (0, 41 - count):
            rows = slice(first, first + count)
            assert torch.equal(invariant(x[rows], weight, bias), whole[rows])
    order = torch.randperm(41)
    assert torch.equal(invariant(x[order], weight, bias), whole[order])
