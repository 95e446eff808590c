import pytest
import torch
from blocks import LENGTHS, Memory, in_steps

from treadle.kernels.token_shift import blend


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cut_anywhere_every_row_gets_the_one_before(flat: bool, dtype: torch.dtype) -> None:
    sequences = [[torch.randn(length, 6).to(dtype)] for length in LENGTHS]
    memory = Memory(3, (6,), dtype, flat=flat)

    def call(*args: object) -> torch.Tensor:
        x, tail = args
        return torch.ops.treadle.token_shift(x, *tail)

    for sequence, (made, (x,)) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        assert torch.equal(made, torch.cat([torch.zeros_like(x[:1]), x[:-1]]))
        assert torch.equal(memory.state(sequence), x[-1])


def test_a_blend_is_a_mixture_by_channel() -> None:
    x, before, share = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0.0, 0.25, 1.0])
    made = blend(x, before, share)
    assert torch.equal(made[:, 0], before[:, 0])
    assert torch.equal(made[:, 2], x[:, 2])
    torch.testing.assert_close(made[:, 1], x[:, 1] / 4 + before[:, 1] * 3 / 4)
