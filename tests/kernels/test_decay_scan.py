import pytest
import torch
from blocks import LENGTHS, Memory, in_steps

H, D = 3, 5


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("rate", [0.01, 4.0])
def test_cut_anywhere_it_is_the_recurrence_of_the_whole(flat: bool, rate: float) -> None:
    torch.manual_seed(1)
    rates = -rate * torch.rand(H)
    sequences = [[torch.randn(length, H, D) for _ in range(3)] for length in LENGTHS]
    memory = Memory(3, (H, D, D), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        q, k, v, tail = args
        return torch.ops.treadle.decay_scan(q, k, v, rates, *tail)

    for sequence, (made, (q, k, v)) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        state = torch.zeros(H, D, D, dtype=torch.float64)
        for t in range(len(q)):
            state = state * torch.exp(rates.double()).view(H, 1, 1) + torch.einsum(
                "hv,hk->hvk", v[t].double(), k[t].double()
            )
            expected = torch.einsum("hk,hvk->hv", q[t].double(), state).float()
            torch.testing.assert_close(made[t], expected, rtol=1e-4, atol=1e-4 * (1 + float(expected.abs().max())))
        torch.testing.assert_close(memory.state(sequence), state.float(), rtol=1e-4, atol=1e-4)


def test_results_have_the_dtype_of_queries() -> None:
    memory = Memory(1, (H, D, D), torch.float32, flat=True)
    q, k, v = (torch.randn(4, H, D).bfloat16() for _ in range(3))
    tail = memory.tail(torch.tensor([0, 4], dtype=torch.int32), torch.arange(4), torch.tensor([4], dtype=torch.int32))
    assert torch.ops.treadle.decay_scan(q, k, v, -torch.rand(H), *tail).dtype is torch.bfloat16
