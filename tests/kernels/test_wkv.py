import pytest
import torch
from blocks import LENGTHS, Memory, in_steps
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

C = 6


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_cut_anywhere_it_is_transformers(flat: bool, scale: float) -> None:
    """Exponents of a few hundred neither overflow nor vanish."""
    torch.manual_seed(4)
    decay, first = torch.randn(2, C)
    sequences = [[torch.randn(length, C) * scale, torch.randn(length, C)] for length in LENGTHS]
    memory = Memory(3, (3, C), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        k, v, tail = args
        return torch.ops.treadle.wkv(k, v, decay, first, *tail)

    for made, (k, v) in zip(in_steps(call, memory, sequences), sequences):
        theirs, _ = rwkv_linear_attention_cpu(decay, first, k[None], v[None])
        torch.testing.assert_close(made, theirs[0], rtol=1e-3, atol=1e-4)


def test_a_first_token_far_below_zero_has_its_own_value() -> None:
    memory = Memory(1, (3, C), torch.float32, flat=True)
    k, v = torch.full((2, C), -300.0), torch.randn(2, C)
    tail = memory.tail(torch.tensor([0, 2], dtype=torch.int32), torch.arange(2), torch.tensor([2], dtype=torch.int32))
    made = torch.ops.treadle.wkv(k, v, torch.zeros(C), torch.zeros(C), *tail)
    torch.testing.assert_close(made, torch.stack([v[0], (v[0] + v[1]) / 2]))
