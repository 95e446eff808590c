import pytest
import torch
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from treadle.kernels.gated_norm import gated_norm

C = 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "attributes"),
    [
        (Qwen3NextRMSNormGated(C, eps=1e-2), {}),
        (KimiLinearRMSNormGated(C, eps=1e-2), {"cast": "before", "act": "sigmoid"}),
        (BambaRMSNormGated(C, group_size=8, eps=1e-2), {"groups": 3, "gate_first": True}),
        (FalconH1RMSNormGated(C, 1e-2, 3, False), {"groups": 3, "gate_first": True, "cast": "before"}),
        (FalconH1RMSNormGated(C, 1e-2, 2, True), {"groups": 2, "cast": "before"}),
    ],
)
def test_it_rounds_where_transformers_does(dtype: torch.dtype, module: torch.nn.Module, attributes: dict[str, object]):
    module = module.to(dtype)
    x, gate, weight = (torch.randn(*shape).to(dtype) for shape in ((9, C), (9, C), (C,)))
    with torch.no_grad():
        module.weight.copy_(weight)
        theirs = module(x[None], gate[None])[0]
    ours = gated_norm(x, gate, weight, None, "rms", 1e-2, **attributes)
    assert ours.dtype is dtype
    if dtype is torch.bfloat16:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)


def test_a_weight_stored_less_one_and_a_bias():
    x, gate, weight, bias = torch.randn(3, C), torch.randn(3, C), torch.randn(C), torch.randn(C)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + 1) + bias
    made = gated_norm(x, gate, weight, bias, plus_one=True, act="sigmoid")
    torch.testing.assert_close(made, y * gate.sigmoid())
    product = x * gate.sigmoid()
    y = product / (product.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + 1) + bias
    for cast in ("after", "before"):
        made = gated_norm(x, gate, weight, bias, plus_one=True, act="sigmoid", gate_first=True, cast=cast)
        torch.testing.assert_close(made, y)
