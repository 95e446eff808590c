import torch
import torch.nn.functional as F

from treadle.kernels.latent_attention import attend, latent_attention


def test_all_heads_read_one_row_whose_first_channels_are_its_value():
    q, keys, positions = torch.randn(4, 3, 12), torch.randn(9, 12), torch.tensor([5, 6, 7, 8])
    seen = positions[:, None] >= torch.arange(9)
    alike = keys.expand(3, -1, -1)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), alike, alike[..., :8], attn_mask=seen, scale=0.3)
    torch.testing.assert_close(attend(q, keys, positions, None, 0.3, 8, 0, None), expected.transpose(0, 1))


def test_a_choice_a_window_and_a_sink():
    q, keys, positions = torch.randn(2, 3, 12), torch.randn(9, 12), torch.tensor([4, 8])
    select = torch.tensor([[1, 3, -1], [6, 7, 8]], dtype=torch.int32)
    for places, rows in (([1, 3], slice(0, 1)), ([6, 7, 8], slice(1, 2))):
        few = keys[places].expand(3, -1, -1)
        expected = F.scaled_dot_product_attention(q[rows].transpose(0, 1), few, few[..., :8], scale=0.3)
        chosen = attend(q[rows], keys, positions[rows], None, 0.3, 8, 0, select[rows])
        torch.testing.assert_close(chosen, expected.transpose(0, 1))
    alone = attend(q, keys, positions, None, 0.3, 8, 1, None)
    torch.testing.assert_close(alone, keys[positions, None, :8].expand(-1, 3, -1))
    # A sink as heavy as the only key that is seen takes half of it.
    logits = torch.einsum("thd,td->th", q, keys[positions]) * 0.3
    halves = attend(q[:1], keys, positions[:1], logits[0], 0.3, 8, 1, None)
    torch.testing.assert_close(halves, alone[:1] / 2)


def test_keys_are_kept_and_rows_without_any_give_zeros():
    kv = torch.full((2, 10, 1, 12), torch.nan)
    q, k = torch.randn(4, 2, 12), torch.randn(4, 12)
    positions, seq_ids = torch.tensor([0, 1, -1, -1]), torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    q_starts, kv_lens = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    out = latent_attention(q, k, kv, seq_ids, positions, q_starts, kv_lens, None, 0.3, 8)
    assert torch.equal(kv[0, :2, 0], k[:2])
    assert kv[1].isnan().all()
    torch.testing.assert_close(out[0], k[0, :8].expand(2, -1))
    assert out[1].isfinite().all()
    assert not out[2:].any()
