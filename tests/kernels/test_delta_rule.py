import pytest
import torch
from blocks import LENGTHS, Memory, Tail, in_steps
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

HK, HV, DK, DV = 2, 4, 16, 8
SCALE = 0.3


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, l2norm: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is defined, in double."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    if l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(HV // HK, 1) for t in (q, k))
    state, out = torch.zeros(HV, DK, DV, dtype=torch.float64), []
    for t in range(len(v)):
        state = state * g[t].exp().view(HV, -1, 1)
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t].view(HV, 1) * error)
        out.append(SCALE * torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out).float(), state.float()


def tokens(length: int, by_channel: bool, fastest: float) -> list[torch.Tensor]:
    """Decays from almost none to one that forgets everything, in any order."""
    shape = (length, HV, DK) if by_channel else (length, HV)
    g = -(torch.rand(shape) ** 3) * fastest
    return [
        torch.randn(length, HK, DK),
        torch.randn(length, HK, DK),
        torch.randn(length, HV, DV),
        g,
        torch.rand(length, HV) * 2,
    ]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("fastest", [0.1, 30.0])
def test_cut_anywhere_it_is_the_recurrence_of_the_whole(flat: bool, by_channel: bool, fastest: float):
    torch.manual_seed(3)
    sequences = [tokens(length, by_channel, fastest) for length in LENGTHS]
    memory = Memory(3, (HV, DK, DV), torch.float32, flat=flat)

    def call(*args: object) -> torch.Tensor:
        *rows, tail = args
        return torch.ops.treadle.delta_rule(*rows, *tail, SCALE)

    for sequence, (made, own) in enumerate(zip(in_steps(call, memory, sequences), sequences)):
        expected, state = token_by_token(*own)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(memory.state(sequence), state, rtol=1e-5, atol=1e-5)


def run(own: list[torch.Tensor], l2norm: bool, scale: float = SCALE) -> torch.Tensor:
    length = len(own[0])
    memory = Memory(1, (HV, DK, DV), torch.float32, flat=True)
    tail: Tail = memory.tail(
        torch.tensor([0, length], dtype=torch.int32), torch.arange(length), torch.tensor([length], dtype=torch.int32)
    )
    return torch.ops.treadle.delta_rule(*own, *tail, scale, l2norm)


def test_it_is_transformers_and_heads_keep_their_length_without_l2norm():
    own = tokens(40, False, 2.0)
    theirs, _ = torch_recurrent_gated_delta_rule(*(t[None] for t in own), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(run(own, True, DK**-0.5), theirs[0], rtol=1e-5, atol=1e-5)
    # keys longer than 1 make the recurrence grow: short ones here
    own[1] = own[1] / DK
    torch.testing.assert_close(run(own, False), token_by_token(*own, l2norm=False)[0], rtol=1e-5, atol=1e-5)


def test_results_have_the_dtype_of_values_and_rows_need_not_lie_together():
    own = tokens(20, False, 2.0)
    joined = torch.cat([t.flatten(1) for t in own[:3]], 1).bfloat16()
    parts = joined.split([HK * DK, HK * DK, HV * DV], 1)
    views = [part.view(20, -1, dim) for part, dim in zip(parts, (DK, DK, DV))]
    made = run([*views, *own[3:]], True)
    assert made.dtype is torch.bfloat16
    expected, _ = token_by_token(*views, *own[3:])
    torch.testing.assert_close(made, expected.bfloat16(), rtol=1e-2, atol=1e-5)
