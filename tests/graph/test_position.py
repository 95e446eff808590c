import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from treadle.graph.position import alibi_slopes, sine_rows


@pytest.mark.parametrize("dim", [8, 10])
def test_sines_are_those_of_ctrl_and_xglm(dim: int):
    torch.testing.assert_close(sine_rows(dim, 7, endpoint=False), positional_encoding(7, dim, torch.float))
    torch.testing.assert_close(
        sine_rows(dim, 7, endpoint=True), XGLMSinusoidalPositionalEmbedding.get_embedding(7, dim, None)
    )


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71])
def test_slopes_are_those_of_bloom_and_mpt(heads: int):
    positions = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads, 8.0), positions[:, 0, 1])
    for largest in (8, 4):
        bias = build_mpt_alibi_tensor(heads, 2, largest)
        torch.testing.assert_close(alibi_slopes(heads, largest), -bias[:, 0, 0])
