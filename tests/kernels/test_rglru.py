import pytest
import torch
import torch.nn.functional as F
from blocks import LENGTHS, Memory, in_steps

C = 7


@pytest.mark.parametrize("flat", [False, True])
def test_cut_anywhere_it_is_the_recurrence_of_the_whole(flat: bool) -> None:
    torch.manual_seed(2)
    in_bias, a_bias, param = torch.randn(3, C)
    sequences = [[torch.randn(length, C) for _ in range(3)] for length in LENGTHS]
    memory = Memory(3, (C,), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        x, in_gate, a_gate, tail = args
        return torch.ops.treadle.rglru(x, in_gate, a_gate, in_bias, a_bias, param, *tail)

    for sequence, (made, (x, in_gate, a_gate)) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        state = torch.zeros(C)
        for t in range(len(x)):
            log_a = -8 * F.softplus(param) * torch.sigmoid(a_gate[t] + a_bias)
            share = torch.sqrt(1 - torch.exp(2 * log_a)) if t else torch.ones(C)
            state = torch.exp(log_a) * state + share * torch.sigmoid(in_gate[t] + in_bias) * x[t]
            torch.testing.assert_close(made[t], state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory.state(sequence), state, rtol=1e-4, atol=1e-5)
