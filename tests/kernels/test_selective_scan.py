import pytest
import torch
from blocks import LENGTHS, Memory, in_steps
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

INNER, N = 12, 5


def token_by_token(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is defined, in double."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    state, out = torch.zeros(INNER, N, dtype=torch.float64), []
    for t in range(len(x)):
        state = state * (dt[t].view(INNER, 1) * A).exp() + (dt[t] * x[t]).view(INNER, 1) * B[t]
        out.append(state @ C[t] + (0 if D is None else D.double() * x[t]))
    return torch.stack(out).float(), state.float()


def tokens(length: int, fastest: float) -> list[torch.Tensor]:
    return [
        torch.randn(length, INNER),
        torch.rand(length, INNER) ** 3 * fastest,
        torch.randn(length, N),
        torch.randn(length, N),
    ]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("fastest", "skip"), [(0.1, True), (20.0, False)])
def test_cut_anywhere_it_is_the_recurrence_of_the_whole(flat: bool, fastest: float, skip: bool):
    torch.manual_seed(3)
    A, D = -torch.rand(INNER, N) - 0.1, torch.randn(INNER) if skip else None
    sequences = [tokens(length, fastest) for length in LENGTHS]
    memory = Memory(3, (INNER, N), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        x, dt, B, C, tail = args
        return torch.ops.treadle.selective_scan(x, dt, A, B, C, D, *tail)

    for sequence, (made, (x, dt, B, C)) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        expected, state = token_by_token(x, dt, A, B, C, D)
        scale = float(expected.std())
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(memory.state(sequence), state, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_transformers_and_keeps_the_dtype_of_its_input(dtype: torch.dtype):
    x, dt, B, C = tokens(40, 1.0)
    x, B, C = (t.to(dtype) for t in (x, B, C))
    A, D = -torch.rand(INNER, N), torch.randn(INNER)
    memory = Memory(1, (INNER, N), torch.float32, flat=True)
    tail = memory.tail(
        torch.tensor([0, 40], dtype=torch.int32), torch.arange(40), torch.tensor([40], dtype=torch.int32)
    )
    made = torch.ops.treadle.selective_scan(x, dt, A, B, C, D, *tail)
    assert made.dtype is dtype
    wide = [t.float().t()[None] for t in (x, dt)] + [A] + [t.float().t()[None] for t in (B, C)]
    theirs = mamba_selective_scan(*wide, D=D)[0].t()
    exact = dtype is torch.float32
    torch.testing.assert_close(made, theirs.to(dtype), rtol=1e-5 if exact else 1e-2, atol=1e-5 if exact else 1e-3)
