import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from treadle.kernels.hash_route import hash_route


@torch.no_grad()
def test_it_is_deepseek_v4s() -> None:
    config = DeepseekV4Config(
        hidden_size=8, n_routed_experts=6, num_experts_per_tok=2, vocab_size=9, num_hidden_layers=1,
        routed_scaling_factor=1.3,
    )  # fmt: skip
    theirs = DeepseekV4HashRouter(config)
    theirs.weight.copy_(torch.randn(6, 8))
    theirs.tid2eid.copy_(torch.rand(9, 6).argsort(-1)[:, :2])
    x, ids = torch.randn(5, 8), torch.tensor([0, 3, 8, 3, 1])
    logits, weights, chosen = theirs(x[None], ids[None])
    made, experts = hash_route(logits, ids, theirs.tid2eid.int(), "sqrtsoftplus", True, 1e-20, 0.0, 1.3)
    torch.testing.assert_close(made, weights)
    assert torch.equal(experts, chosen.int())


def test_a_sum_may_have_a_floor() -> None:
    logits, table = torch.zeros(1, 4), torch.tensor([[2, 1]], dtype=torch.int32)
    made, _ = hash_route(logits, torch.tensor([0]), table, "softmax", True, 0.0, 2.0)
    torch.testing.assert_close(made, torch.full((1, 2), 0.125))
