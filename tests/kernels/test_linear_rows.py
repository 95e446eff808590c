"""Products in blocks of rows: the product itself anywhere, the same bits for a row in any place on a GPU."""

import pytest
import torch

from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.linear_rows import ROWS, linear_rows


@pytest.mark.parametrize("count", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_any_number_of_rows_is_the_product(count: int):
    x, weight, bias = torch.randn(count, 30)[:, :24], torch.randn(10, 24), torch.randn(10)
    for each in (None, bias):
        y = linear_rows(x, weight, each)
        assert y.is_contiguous()
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, each), atol=1e-4, rtol=1e-4)
    assert linear_rows(torch.randn(2, 3, 24), weight).shape == (2, 3, 10)


def test_it_serves_deterministic_targets_with_a_gpu():
    for deterministic in (False, True):
        target = Target(device="cuda", features=frozenset({"sm_90"}), deterministic=deterministic)
        names = [each.name for each in registry.candidates("linear", target, {})]
        assert names == (["linear.rows"] if deterministic else ["linear.reference"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "width"), [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (130, 96)])
def test_a_row_has_the_same_bits_wherever_it_stands(dtype: torch.dtype, outputs: int, width: int):
    x, weight = torch.randn(3 * ROWS, width, device="cuda").to(dtype), torch.randn(outputs, width, device="cuda")
    weight = weight.to(dtype)
    whole = linear_rows(x, weight)
    for count in (1, 7, ROWS, ROWS + 3):
        for first in (0, 1, 63, 64, 100, 3 * ROWS - count):
            assert torch.equal(linear_rows(x[first : first + count], weight), whole[first : first + count])
    order = torch.randperm(3 * ROWS, device="cuda")
    assert torch.equal(linear_rows(x[order], weight), whole[order])
