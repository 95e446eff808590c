import pytest
import torch
from blocks import LENGTHS, Memory, in_steps
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

H, P, G, N = 4, 6, 2, 8


def token_by_token(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is defined, in double."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    B, C = (t.repeat_interleave(H // G, 1) for t in (B, C))
    state, out = torch.zeros(H, P, N, dtype=torch.float64), []
    for t in range(len(x)):
        state = state * (dt[t] * A).exp().view(H, 1, 1) + torch.einsum("hp,hn->hpn", dt[t].view(H, 1) * x[t], B[t])
        skip = 0 if D is None else D.double().view(H, 1) * x[t]
        out.append(torch.einsum("hpn,hn->hp", state, C[t]) + skip)
    return torch.stack(out).float(), state.float()


def tokens(length: int, fastest: float) -> list[torch.Tensor]:
    dt = torch.rand(length, H) ** 3 * fastest
    return [torch.randn(length, H, P), dt, torch.randn(length, G, N), torch.randn(length, G, N)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("fastest", "skip"), [(0.1, True), (20.0, False)])
def test_cut_anywhere_it_is_the_recurrence_of_the_whole(flat: bool, fastest: float, skip: bool):
    torch.manual_seed(3)
    A, D = -torch.rand(H) - 0.1, torch.randn(H) if skip else None
    sequences = [tokens(length, fastest) for length in LENGTHS]
    memory = Memory(3, (H, P, N), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        x, dt, B, C, tail = args
        return torch.ops.treadle.ssm_scan(x, dt, A, B, C, D, *tail)

    for sequence, (made, (x, dt, B, C)) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        expected, state = token_by_token(x, dt, A, B, C, D)
        scale = float(expected.std())
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(memory.state(sequence), state, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_transformers_and_keeps_the_dtype_of_its_input(dtype: torch.dtype):
    x, dt, B, C = tokens(40, 1.0)
    x, B, C = (t.to(dtype) for t in (x, B, C))
    A, D = -torch.rand(H), torch.randn(H)
    memory = Memory(1, (H, P, N), torch.float32, flat=True)
    tail = memory.tail(
        torch.tensor([0, 40], dtype=torch.int32), torch.arange(40), torch.tensor([40], dtype=torch.int32)
    )
    made = torch.ops.treadle.ssm_scan(x, dt, A, B, C, D, *tail)
    theirs = mamba2_chunk_scan(x[None], dt[None], A, B[None], C[None], 16, D=D)[0]
    exact = dtype is torch.float32
    torch.testing.assert_close(made, theirs.to(dtype), rtol=1e-5 if exact else 1e-2, atol=1e-5 if exact else 1e-3)
