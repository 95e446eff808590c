import pytest
import torch
from blocks import LENGTHS, Memory, Tail, in_steps
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

C = 10


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("width", "act", "bias", "dtype"),
    [(4, "silu", True, torch.float32), (3, "none", False, torch.float32), (2, "silu", False, torch.bfloat16)],
)
def test_cut_anywhere_it_is_the_convolution_of_the_whole(
    flat: bool, width: int, act: str, bias: bool, dtype: torch.dtype
):
    weight, shift = torch.randn(C, width).to(dtype), torch.randn(C).to(dtype) if bias else None
    tokens = [[torch.randn(length, C).to(dtype)] for length in LENGTHS]
    memory = Memory(3, (width - 1, C), dtype, flat=flat)

    def call(x: torch.Tensor, tail: Tail) -> torch.Tensor:
        return torch.ops.treadle.conv1d(x, weight, shift, *tail, act)

    for sequence, (made, (x,)) in enumerate(zip(in_steps(call, memory, tokens), tokens)):
        assert made.dtype is dtype
        wide = causal_conv1d_fn(
            x.float().t()[None],
            weight.float(),
            None if shift is None else shift.float(),
            None if act == "none" else act,
        )
        torch.testing.assert_close(
            made, wide[0].t().to(dtype), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5
        )
        assert torch.equal(memory.state(sequence), x[len(x) - width + 1 :])


def test_a_first_chunk_shorter_than_the_window_leaves_zeros_before_it():
    memory = Memory(1, (3, C), torch.float32, flat=True)
    x, one = torch.randn(2, C), torch.tensor([0, 2], dtype=torch.int32)
    tail = memory.tail(one, torch.arange(2), torch.tensor([2], dtype=torch.int32))
    torch.ops.treadle.conv1d(x, torch.randn(C, 4), None, *tail, "none")
    assert torch.equal(memory.state(0), torch.cat([torch.zeros(1, C), x]))
