"""The Triton kernels of norm and add_norm against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import norm_triton, registry
from treadle.kernels.norm import norm

ADD_NORM = registry.reference("add_norm").function
# Triton's interpreter cuts bf16 off instead of rounding it
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}
DTYPES = list(TOLERANCE)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype is theirs.dtype
    assert ours.is_contiguous()
    tolerance = TOLERANCE[theirs.dtype]
    torch.testing.assert_close(ours.cpu(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 1000, 1024])
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_it_is_the_norm(device: str, dtype: torch.dtype, width: int, kind: str):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, width), (width,), (width,)))
    for w, b, plus_one, cast in (
        (weight, None, False, "after"),
        (weight, bias, True, "before"),
        (None, None, False, "after"),
    ):
        ours = norm_triton.norm(
            x.to(device), None if w is None else w.to(device), None if b is None else b.to(device), kind, 1e-2,
            plus_one, 1, cast,
        )  # fmt: skip
        close(ours, norm(x, w, b, kind, 1e-2, plus_one, 1, cast))


@settings(deadline=None, max_examples=25)
@given(st.data())
@pytest.mark.parametrize("device", DEVICES)
def test_any_shape_and_stride(device: str, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    groups, heads, tokens = draw(1, 1, 3), draw(1, 2, 5), draw(0, 1, 7)
    width = groups * draw(1, 16, 33)
    # heads as they lie in a joined product, or the last dim strided
    form = draw("plain", "heads", "slice", "transposed", "deep")
    x = {
        "plain": lambda: torch.randn(tokens, width),
        "heads": lambda: torch.randn(tokens, heads * width + 5)[:, : heads * width].view(tokens, heads, width),
        "slice": lambda: torch.randn(tokens, width + 3)[:, 3:],
        "transposed": lambda: torch.randn(width, tokens).T,
        "deep": lambda: torch.randn(2, tokens, heads, width),
    }[form]()
    each = draw(True, False) and form in ("heads", "deep")
    weight = torch.randn(heads, width) if each else torch.randn(width)
    bias = draw(None, torch.randn(width))
    ours = norm_triton.norm(
        x.to(device), weight.to(device), bias if bias is None else bias.to(device), "rms", 1e-3, False, groups
    )
    close(ours, norm(x, weight, bias, "rms", 1e-3, False, groups))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_rows_that_no_program_can_hold(device: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(norm_triton, "LONGEST_TILE", 64)
    monkeypatch.setattr(norm_triton, "STEP", 32)
    x, other, weight, bias = torch.randn(3, 150), torch.randn(3, 150), torch.randn(150), torch.randn(150)
    args = weight.to(device), bias.to(device)
    close(norm_triton.norm(x.to(device), *args, kind, 1e-3), norm(x, weight, bias, kind, 1e-3))
    total, out = norm_triton.add_norm(x.to(device), other.to(device), *args, 0.5, 2.0, kind)
    expected = ADD_NORM(x, other, weight, bias, 0.5, 2.0, kind)
    close(total, expected[0])
    close(out, expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_add_goes_first(device: str, dtype: torch.dtype):
    a, b, weight = torch.randn(6, 72).to(dtype), torch.randn(6, 80).to(dtype)[:, :72], torch.randn(72).to(dtype)
    ours = norm_triton.add_norm(a.to(device), b.to(device), weight.to(device), None, 0.5, 2.0, "rms", 1e-2, True)
    for mine, theirs in zip(ours, ADD_NORM(a, b, weight, None, 0.5, 2.0, "rms", 1e-2, True)):
        close(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", ["after", "before"])
@pytest.mark.parametrize("plus_one", [False, True])
def test_it_rounds_where_the_reference_rounds(device: str, cast: str, plus_one: bool):
    # fp16: the interpreter rounds it as the device does
    x, weight, bias = torch.randn(40, 512).half(), torch.randn(512).half(), torch.randn(512).half()
    args = ("rms", 1e-6, plus_one, 1, cast)
    ours = norm_triton.norm(x.to(device), weight.to(device), bias.to(device), *args).cpu()
    other = "before" if cast == "after" else "after"
    same = (ours == norm(x, weight, bias, *args)).float().mean()
    if_not = (ours == norm(x, weight, bias, *args[:-1], other)).float().mean()
    assert same > 0.99
    assert if_not < 0.9


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels import norm_triton
for dtype in (torch.float32, torch.bfloat16):
    x, w = torch.zeros(8, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    norm_triton.add_norm(x, x, w, None, pdl=True)
    norm_triton.norm(x.view(8, 32, 128), w[:128], w[:128], "layer", pdl=True)
norm_triton.norm(torch.zeros(2, 40000), None, None, "l2", pdl=True)
""")
    assert [each["name"] for each in compiled] == ["_norm"] * 4 + ["_norm_long"]
