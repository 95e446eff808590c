import pytest
import torch

from treadle.kernels import registry
from treadle.kernels.head_linear import head_linear, head_linear_cpp, head_linear_rows


@pytest.mark.parametrize("function", [head_linear, head_linear_cpp, head_linear_rows])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_each_head_has_a_matrix_of_its_own(function, tokens: int):
    x, weight = torch.randn(tokens, 12)[:, :12].view(tokens, 3, 4), torch.randn(3, 5, 4)
    expected = torch.stack([x[:, h] @ weight[h].T for h in range(3)], 1)
    torch.testing.assert_close(function(x, weight), expected)
    assert function(x, weight).is_contiguous()


@pytest.mark.parametrize("function", [head_linear_cpp, head_linear_rows])
def test_rows_do_not_depend_on_their_neighbours(function):
    x, weight = torch.randn(70, 3, 40), torch.randn(3, 5, 40)
    assert torch.equal(function(x, weight)[3:4], function(x[3:4], weight))


def test_its_shape_is_known_before_it_runs():
    args = (torch.randn(2, 3, 4), torch.randn(3, 5, 4))
    torch.library.opcheck(torch.ops.treadle.head_linear.default, args, test_utils=("test_schema", "test_faketensor"))
    assert registry.reference("head_linear").inline
