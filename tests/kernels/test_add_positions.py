import torch

from treadle.kernels.add_positions import add_positions


def test_rows_are_those_of_positions_behind_the_offset():
    x, table = torch.randn(3, 4), torch.randn(7, 4)
    out = add_positions(x, torch.tensor([0, 4, -1]), table, 2)
    torch.testing.assert_close(out, x + table[torch.tensor([2, 6, 2])])
