import torch

from treadle.kernels import registry

T, H, K, D = 6, 4, 2, 8


def test_it_reads_what_attention_has_appended() -> None:
    registry.load_all()
    q, k, v = torch.randn(T, H, D), torch.randn(T, K, D), torch.randn(T, K, D)
    steps = (
        torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 0, -1]),
        torch.tensor([0, 4, 6, 6], dtype=torch.int32), torch.tensor([4, 1, 0], dtype=torch.int32),
    )  # fmt: skip
    kv = torch.full((3, 9, K, 2 * D), torch.nan)
    slopes, sinks = torch.rand(H), torch.randn(H)
    rest = (sinks, 0.3, 3, 2.0, 2, slopes)
    expected = torch.ops.treadle.attention(q, k, v, kv, *steps, *rest)
    before = kv.clone()
    made = torch.ops.treadle.shared_attention(q, kv, *steps, sinks, D, *rest[1:])
    assert torch.equal(made[:5], expected[:5])
    torch.testing.assert_close(kv, before, equal_nan=True)
