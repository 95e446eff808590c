"""The Triton kernels of linear_int8 against the reference: interpreted here, natively on a GPU, compiled for sm_90."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.graph.target import Target
from treadle.kernels import linear_int8_triton, registry
from treadle.kernels.linear_int8 import linear_int8, quantize_int8
from treadle.kernels.linear_int8_triton import Int8Blocks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
CUTS = [None, Int8Blocks(rows=8, outputs=16, columns=64), Int8Blocks(rows=16, outputs=32, columns=32)]


def arguments(dtype: torch.dtype, rows: int, outputs: int, width: int, group: int, bias: bool) -> list[Tensor | None]:
    random = torch.Generator().manual_seed(rows + outputs)
    weight, scale = quantize_int8(torch.randn(outputs, width, generator=random) * width**-0.5, group)
    x = torch.randn(rows, width + 8, generator=random).to(dtype)[:, :width]
    return [x, weight, scale, torch.randn(outputs, generator=random).to(dtype) if bias else None]


def check(device: str, args: list[Tensor | None], group: int, **options: object) -> None:
    expected = linear_int8(*args, group)
    given = [each if each is None else each.to(device) for each in args]
    found = linear_int8_triton.linear_int8(*given, group, **options).cpu()
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5, 8, 17, 70])
@pytest.mark.parametrize(("outputs", "width", "group"), [(70, 160, 32), (33, 96, 16)])
def test_equals_the_reference(
    device: str, dtype: torch.dtype, rows: int, outputs: int, width: int, group: int
) -> None:  # fmt: skip
    check(device, arguments(dtype, rows, outputs, width, group, rows % 2 == 1), group)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [7, 30])
def test_every_cut(device: str, cut: Int8Blocks | None, rows: int) -> None:
    check(device, arguments(torch.float32, rows, 40, 224, 32, True), 32, blocks=cut)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_many_rows_go_through_weights_in_memory(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_int8_triton, "TILED_ROWS", 64)
    monkeypatch.setattr(linear_int8_triton, "WIDENED_BYTES", 1)
    check(device, arguments(dtype, 65, 150, 96, 32, True), 32)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_more_dimensions(device: str) -> None:
    _, weight, scale, bias = (
        each if each is None else each.to(device) for each in arguments(torch.float16, 1, 9, 64, 32, True)
    )
    for shape in ((0, 64), (2, 0, 64), (2, 3, 64), (64,)):
        x = torch.randn(shape, device=device).half()
        found = linear_int8_triton.linear_int8(x, weight, scale, bias, 32)
        torch.testing.assert_close(found, linear_int8(x, weight, scale, bias, 32), atol=4e-3, rtol=4e-3)


def test_a_gpu_has_it_for_groups_that_tensor_cores_take() -> None:
    for features, best in (((), "triton"), (("sm_90",), "triton_pdl")):
        target = Target(device="cuda", dtype="bfloat16", features=frozenset(features))
        assert registry.candidates("linear_int8", target, {"group": 32})[0].name == f"linear_int8.{best}"
        for group in (8, 48):
            assert registry.candidates("linear_int8", target, {"group": group})[0].is_reference
        mixed = {"group": 32, "dtypes": {"x": torch.float32, "bias": torch.float16}}
        assert registry.candidates("linear_int8", target, mixed)[0].is_reference


def test_every_variant_compiles_for_sm_90() -> None:
    compiled = compile_for_sm90(
        """
from treadle.kernels import linear_int8_triton

def launch(dtype, rows, outputs, bias=None):
    weight, scale = torch.zeros(outputs, 1024, dtype=torch.int8), torch.zeros(outputs, 32)
    x = torch.zeros(rows, 1024, dtype=dtype)
    linear_int8_triton.linear_int8(x, weight, scale, x[0, :1].expand(outputs) if bias else None, 32, pdl=True)

launch(torch.bfloat16, 1, 4096, bias=True)
launch(torch.bfloat16, 16, 151936)
launch(torch.float32, 1, 4096)
launch(torch.float32, 40, 3072)
launch(torch.bfloat16, 500, 3072, bias=True)
launch(torch.float16, 2000, 64)
"""
    )
    assert [each["name"] for each in compiled] == ["few", "few", "few", "tiles", "tiles", "widen"]
    assert compiled[4]["wgmma"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_wherever_it_stands(device: str):
    x, weight, scale, bias = (each.to(device) for each in arguments(torch.bfloat16, 70, 40, 96, 32, True))
    whole = linear_int8_triton.linear_int8(x, weight, scale, bias, 32, invariant=True)
    torch.testing.assert_close(whole.cpu(), linear_int8(x, weight, scale, bias, 32).cpu(), atol=2e-2, rtol=2e-2)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 12), slice(5, 70)):
        assert torch.equal(
            linear_int8_triton.linear_int8(x[rows], weight, scale, bias, 32, invariant=True), whole[rows]
        )
