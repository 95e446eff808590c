"""The Triton products of a few rows against the references, every way of cutting them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import linear_triton, registry
from treadle.kernels.linear_blocks import Blocks

LINEAR, LINEAR_ADD, NORM_GATED = (
    registry.reference(op).function for op in ("linear", "linear_add", "norm_gated_linear")
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
WAYS = (Blocks("held", 2, 256), Blocks("looped", 4, 32), Blocks("dot", 16, 32, 4, 2))


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[theirs.dtype]
    torch.testing.assert_close(ours.cpu(), theirs, atol=tolerance, rtol=tolerance)


def can(way: Blocks, device: str, dtype: torch.dtype) -> bool:
    """The interpreter multiplies the bits of bf16 matrices."""
    return not (way.way == "dot" and device == "cpu" and dtype == torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.way)
@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(deadline=None, max_examples=8)
@given(st.data())
def test_every_way_gives_every_form(device: str, way: Blocks, dtype: torch.dtype, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    if not can(way, device, dtype):
        dtype = torch.float16
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tokens, outputs, width = draw(1, 2, 3, 8), draw(1, 5, 33), draw(1, 17, 64, 200)
    # rows as they lie in a joined product
    x = (5 * randn(tokens, width + 3, dtype=dtype))[:, :width]
    weight, bias = randn(2 * outputs, width, dtype=dtype), draw(None, randn(2 * outputs, dtype=dtype))
    residual = randn(tokens, outputs, dtype=dtype)
    device_x, device_weight = x.to(device), weight.to(device)
    device_bias = None if bias is None else bias.to(device)
    y = x.new_empty(tokens, outputs, device=device)
    half = None if bias is None else bias[:outputs]
    first = device_weight[:outputs]
    linear_triton.run(way, device_x, first, y, bias=None if half is None else half.to(device))
    close(y, LINEAR(x, weight[:outputs], half))
    y = torch.empty_like(y)
    linear_triton.run(
        way, device_x, first, y, bias=None if half is None else half.to(device), residual=residual.to(device),
        alpha=0.5, beta=2.0,
    )  # fmt: skip
    close(y, LINEAR_ADD(x, weight[:outputs], half, residual, 0.5, 2.0))
    kind, cast, plus_one = draw("rms", "layer", "l2"), draw("after", "before"), draw(False, True)
    norm_weight, norm_bias = draw(None, randn(width, dtype=dtype)), draw(None, randn(width, dtype=dtype))
    y = torch.empty_like(y)
    linear_triton.run(
        way, device_x, device_weight, y, bias=device_bias, act="silu", norm=kind,
        norm_weight=None if norm_weight is None else norm_weight.to(device),
        norm_bias=None if norm_bias is None else norm_bias.to(device), eps=1e-2, plus_one=plus_one,
        after=cast == "after" and kind != "layer",
    )  # fmt: skip
    close(y, NORM_GATED(x, norm_weight, norm_bias, kind, 1e-2, plus_one, 1, cast, weight, bias, "silu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 3, 16), (9, 16)])
def test_the_ops_take_rows_of_any_shape_and_number(device: str, shape: tuple[int, ...]):
    x, weight, bias = torch.randn(shape), torch.randn(10, 16), torch.randn(10)
    residual, norm_weight = torch.randn(*shape[:-1], 10), torch.randn(16)
    at = [value.to(device) for value in (x, weight, bias, residual, norm_weight)]
    close(linear_triton.linear(*at[:3]), LINEAR(x, weight, bias))
    close(linear_triton.linear_add(*at[:4], 1.0, 3.0), LINEAR_ADD(x, weight, bias, residual, 1.0, 3.0))
    for groups in (1, 4):
        ours = linear_triton.norm_gated_linear(
            at[0], at[4], None, "rms", 1e-2, False, groups, "after", at[1], at[2], "gelu_new"
        )
        close(ours, NORM_GATED(x, norm_weight, None, "rms", 1e-2, False, groups, "after", weight, bias, "gelu_new"))


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_not_dense_and_rows_that_are_not(device: str):
    x, weight = torch.randn(16, 3).T, torch.randn(16, 5).T
    close(linear_triton.linear(x.to(device), weight.to(device)), LINEAR(x, weight))
    dense = weight.contiguous()
    close(linear_triton.linear(x.to(device), dense.to(device)), LINEAR(x, dense))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.way)
def test_values_that_are_not_finite_stay_in_their_row(device: str, way: Blocks):
    x, weight = torch.randn(3, 40, device=device), torch.ones(4, 40, device=device)
    x[1, 7] = float("nan")
    y = torch.empty(3, 4, device=device)
    linear_triton.run(way, x, weight, y)
    assert y.isnan().any(1).tolist() == [False, True, False]


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels import linear_triton
from treadle.kernels.linear_blocks import Blocks, general
b = torch.bfloat16
x, w, norm = torch.zeros(8, 4096, dtype=b), torch.zeros(256, 4096, dtype=b), torch.zeros(4096, dtype=b)
for tokens in (1, 8):
    for blocks in (Blocks("held", 1, 4096), Blocks("looped", 1, 1024), Blocks("dot", 16, 256, 4, 4)):
        y = torch.zeros(tokens, 256, dtype=b)
        linear_triton.run(blocks, x[:tokens], w, y, residual=y, pdl=True)
        linear_triton.run(
            blocks, x[:tokens], w, y[:, :128], act="silu", norm="rms", norm_weight=norm, after=True, pdl=True
        )
    f = x[:tokens].float()
    linear_triton.run(general("linear", 4096, tokens, f.dtype), f, w.float(), torch.zeros(tokens, 256), pdl=True)
""")
    assert len(compiled) == 14
    assert {each["name"] for each in compiled} == {"_held", "_looped", "_dot"}
