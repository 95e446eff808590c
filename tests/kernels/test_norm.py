import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from treadle.kernels.norm import norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 1000])
def test_llama_rounds_before_the_weight(dtype: torch.dtype, width: int):
    module = LlamaRMSNorm(width, eps=1e-2).to(dtype)
    module.weight.data.normal_()
    x = torch.randn(5, width).to(dtype)
    with torch.no_grad():
        assert torch.equal(torch.ops.treadle.norm(x, module.weight, None, "rms", 1e-2), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rounds_after_the_weight_plus_one(dtype: torch.dtype):
    module = Gemma3RMSNorm(65, eps=1e-2).to(dtype)
    module.weight.data.normal_()
    x = torch.randn(5, 65).to(dtype)
    with torch.no_grad():
        ours = torch.ops.treadle.norm(x, module.weight, None, "rms", 1e-2, True, 1, "before")
        assert torch.equal(ours, module(x))


def test_the_two_roundings_differ():
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    assert not torch.equal(norm(x, weight, None), norm(x, weight, None, cast="before"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_rounds_once(dtype: torch.dtype):
    module = torch.nn.LayerNorm(63, eps=1e-3).to(dtype)
    module.weight.data.normal_()
    module.bias.data.normal_()
    x = torch.randn(5, 63).to(dtype)
    with torch.no_grad():
        ours = torch.ops.treadle.norm(x, module.weight, module.bias, "layer", 1e-3)
        torch.testing.assert_close(ours, module(x))


def test_a_weight_a_head():
    module = CohereLayerNorm((3, 16), eps=1e-2)
    module.weight.data.normal_()
    x = torch.randn(5, 3, 16)
    with torch.no_grad():
        assert torch.equal(norm(x, module.weight, None, "layer", 1e-2), module(x))


def test_l2_is_what_torch_normalises():
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(norm(x, None, None, "l2", 0.0), torch.nn.functional.normalize(x, dim=-1))


def test_groups_have_their_own_statistics():
    x, weight = torch.randn(5, 24), torch.randn(24)
    each = torch.cat([norm(part, None, None) for part in x.chunk(4, -1)], -1) * weight
    torch.testing.assert_close(norm(x, weight, None, groups=4), each)


@pytest.mark.parametrize(("field", "value"), [("kind", "batch"), ("cast", "later")])
def test_an_unknown_choice_is_refused(field: str, value: str):
    with pytest.raises(ValueError, match=value):
        norm(torch.randn(2, 4), None, None, **{field: value})
