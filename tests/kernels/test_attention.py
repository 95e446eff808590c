import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from treadle.kernels.attention import attend

H, K, D = 6, 2, 16


def visible(queries: int, keys: int, window: int = 0) -> torch.Tensor:
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys))


def sequence(queries: int, keys: int, v_dim: int = D) -> tuple[torch.Tensor, ...]:
    return torch.randn(queries, H, D), torch.randn(keys, K, D), torch.randn(keys, K, v_dim)


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 1, 0), (1, 9, 0), (7, 7, 0), (4, 20, 5), (20, 20, 1)])
@pytest.mark.parametrize("v_dim", [D, 5])
def test_it_is_sdpa_with_an_explicit_mask(queries: int, keys: int, window: int, v_dim: int):
    q, k, v = sequence(queries, keys, v_dim)
    ours = attend(q, k, v, torch.arange(keys - queries, keys), None, 0.3, window, 0.0)
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible(queries, keys, window), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1))


def test_alibi_lowers_logits_by_distance_and_chunks_hide_what_lies_before():
    q, k, v = sequence(9, 25)
    slopes, positions = torch.rand(H), torch.arange(16, 25)
    distance = positions[:, None] - torch.arange(25)
    seen = visible(9, 25) & (positions[:, None] // 10 == torch.arange(25) // 10)
    bias = (-slopes[:, None, None] * distance).masked_fill(~seen, float("-inf"))
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=bias, scale=0.3, enable_gqa=True
    )
    ours = attend(q, k, v, positions, None, 0.3, 0, 0.0, chunk=10, slopes=slopes)
    torch.testing.assert_close(ours, theirs.transpose(0, 1))


class Module(torch.nn.Module):
    num_key_value_groups = H // K
    head_dim = D

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.randn(H)


@pytest.mark.parametrize("window", [0, 3])
def test_softcap_is_gemma2s_and_sinks_are_gpt_oss(window: int):
    q, k, v = sequence(5, 11)
    mask = torch.zeros(5, 11).masked_fill(~visible(5, 11, window), float("-inf"))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    positions, module = torch.arange(6, 11), Module().eval()
    theirs, _ = capped(module, *heads, mask, scaling=0.3, softcap=2.0)
    torch.testing.assert_close(attend(q, k, v, positions, None, 0.3, window, 2.0), theirs[0])
    theirs, _ = with_sinks(module, *heads, mask, scaling=0.3)
    torch.testing.assert_close(attend(q, k, v, positions, module.sinks, 0.3, window, 0.0), theirs[0])


def test_history_grows_and_a_stopped_row_leaves_no_trace():
    kv = torch.full((3, 8, K, 2 * D), float("nan"))
    q, k, v = torch.randn(6, H, D), torch.randn(6, K, D), torch.randn(6, K, D)
    everything = attend(q[:4], k[:4], v[:4], torch.arange(4), None, 0.25, 0, 0.0)
    seq_ids = torch.tensor([0, 0, 0, 2, 2, 1], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 0, 1, -1])
    starts, lengths = torch.tensor([0, 3, 4, 6], dtype=torch.int32), torch.tensor([3, 0, 2], dtype=torch.int32)
    # Flat order is by sequence: three tokens of 0, the stopped one of 1, two of 2.
    rows = torch.tensor([0, 1, 2, 5, 3, 4])
    out = torch.ops.treadle.attention(
        q[rows], k[rows], v[rows], kv, seq_ids[rows], positions[rows], starts, lengths, None, 0.25
    )
    torch.testing.assert_close(out[:3], everything[:3])
    assert (out[3] == 0).all()
    torch.testing.assert_close(out[4:], attend(q[3:5], k[3:5], v[3:5], torch.arange(2), None, 0.25, 0, 0.0))
    assert kv[1].isnan().all()
    assert kv[0, 3:].isnan().all()
    step = torch.ops.treadle.attention(
        q[3:4], k[3:4], v[3:4], kv, torch.tensor([0], dtype=torch.int32), torch.tensor([3]),
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), None, 0.25,
    )  # fmt: skip
    torch.testing.assert_close(step, everything[3:])


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v = sequence(2, 3)
    out = attend(q, k, v, torch.tensor([-1, 0]), torch.randn(H), 1.0, 0, 0.0)
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()
