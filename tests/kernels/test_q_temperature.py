import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from treadle.kernels.q_temperature import q_temperature


def test_it_is_ministral3s_and_a_shift_counts_positions_from_elsewhere():
    q, positions = torch.randn(6, 2, 4), torch.tensor([0, 7, 8, 15, 16, 100])
    factor = get_llama_4_attn_scale(positions[None], 0.3, 8)[0, 0]
    torch.testing.assert_close(q_temperature(q, positions, 0.3, 8), q * factor.unsqueeze(1))
    torch.testing.assert_close(q_temperature(q, positions - 1, 0.3, 8, 1)[1:], q_temperature(q, positions, 0.3, 8)[1:])
    assert torch.equal(q_temperature(q, torch.full((6,), -1), 0.3, 8), q)


def test_smooth_it_grows_from_the_first_length_on():
    q, positions = torch.randn(4, 2, 3), torch.tensor([0, 4, 9, 99])
    factor = 1 + 0.3 * torch.log(torch.tensor([1.0, 1.0, 2.0, 20.0]))
    torch.testing.assert_close(q_temperature(q, positions, 0.3, 5, 1, True), q * factor.view(-1, 1, 1))
