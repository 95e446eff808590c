import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.kernels import linear_int8 as module
from treadle.kernels import registry
from treadle.kernels.linear_int8 import SKINNY_TOKENS, dequantize_int8, linear_int8, quantize_int8

REFERENCE = torch.ops.treadle.linear_int8
CPP = registry.named("linear_int8.cpp").function
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 1, 1), (3, 63, 63), (64, 64, 32), (65, 1000, 8), (131, 96, 32), (40, 60, 20)]


@pytest.mark.parametrize(("rows", "width", "group"), SHAPES)
def test_quantising_rounds_to_the_nearest_code(rows: int, width: int, group: int):
    weight = torch.randn(rows, width)
    codes, scale = quantize_int8(weight, group)
    assert codes.dtype == torch.int8
    assert scale.shape == (rows, width // group)
    error = (dequantize_int8(codes, scale, group) - weight).abs().view(rows, -1, group)
    assert (error <= scale[..., None] * 0.5001).all()
    assert (codes.view(rows, -1, group).abs().amax(-1) == 127).all()


def test_a_group_of_zeros_stays_zero():
    codes, scale = quantize_int8(torch.zeros(2, 8), 4)
    assert codes.eq(0).all()
    assert dequantize_int8(codes, scale, 4).eq(0).all()


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4))
def test_codes_and_scales_are_found_again(groups: int, size: int):
    codes = torch.randint(-127, 128, (3, groups, size), dtype=torch.int8)
    codes[..., 0] = 127
    scale = torch.rand(3, groups) + 0.1
    weight = dequantize_int8(codes.view(3, -1), scale, size)
    again, again_scale = quantize_int8(weight, size)
    assert torch.equal(again, codes.view(3, -1))
    torch.testing.assert_close(again_scale, scale)


def test_a_group_that_does_not_divide_is_refused_with_one_that_does():
    with pytest.raises(ValueError, match="group 33 does not divide 65"):
        quantize_int8(torch.randn(2, 65), 33)


def test_the_reference_is_the_product_of_the_dequantised_weight():
    x, bias = torch.randn(5, 64), torch.randn(9)
    codes, scale = quantize_int8(torch.randn(9, 64), 32)
    expected = x.double() @ dequantize_int8(codes, scale, 32).double().T + bias
    torch.testing.assert_close(REFERENCE(x, codes, scale, bias, 32).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 9, SKINNY_TOKENS, SKINNY_TOKENS + 1, 65])
@pytest.mark.parametrize(("rows", "width", "group"), SHAPES)
def test_cpp_equals_the_reference(dtype: torch.dtype, tokens: int, rows: int, width: int, group: int):
    x, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows).to(dtype)
    codes, scale = quantize_int8(torch.randn(rows, width) / width**0.5, group)
    tolerance = TOLERANCE[dtype]
    for b in (None, bias):
        ours, theirs = CPP(x, codes, scale, b, group), REFERENCE(x, codes, scale, b, group)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_a_weight_of_several_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    x, bias = torch.randn(2, 20, 32), torch.randn(200)
    codes, scale = quantize_int8(torch.randn(200, 32), 32)
    torch.testing.assert_close(CPP(x, codes, scale, bias, 32), REFERENCE(x, codes, scale, bias, 32))


def test_a_row_has_the_same_bits_wherever_it_stands():
    invariant = registry.named("linear_int8.cpp_invariant").function
    x, bias = torch.randn(41, 96), torch.randn(37)
    weight, scale = quantize_int8(torch.randn(37, 96), 32)
    whole = invariant(x, weight, scale, bias, 32)
    torch.testing.assert_close(whole, linear_int8(x, weight, scale, bias, 32), atol=1e-4, rtol=1e-4)
    for count in range(1, 42):
        for first in (0, 41 - count):
            rows = slice(first, first + count)
            assert torch.equal(invariant(x[rows], weight, scale, bias, 32), whole[rows])
