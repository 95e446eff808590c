import pytest
import torch
from transformers import DeepseekV4Config, HYV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from treadle.kernels.hyper import hyper_close, hyper_open, hyper_post, hyper_pre

T, N, C = 5, 3, 8
OPTIONS = {"hc_mult": N, "hc_eps": 1e-3, "hidden_size": C, "rms_norm_eps": 1e-2, "num_hidden_layers": 1}


def filled(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for weight in module.parameters():
        weight.data.copy_(torch.randn(weight.shape))
    return module


@torch.no_grad()
@pytest.mark.parametrize("iters", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_streams_are_deepseek_v4s(iters: int, dtype: torch.dtype) -> None:
    theirs = filled(DeepseekV4HyperConnection(DeepseekV4Config(**OPTIONS, hc_sinkhorn_iters=iters)))
    streams, y = torch.randn(T, N, C).to(dtype), torch.randn(T, C).to(dtype)
    x, spread = hyper_pre(streams, theirs.fn, theirs.base, theirs.scale, "mhc", iters, 1e-3, 1e-2, 1.0)
    post, comb, collapsed = (t[0] for t in theirs(streams[None]))
    torch.testing.assert_close(x, collapsed)
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    expected = post.to(dtype).unsqueeze(-1) * y.unsqueeze(1) + mixed
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(hyper_post(y, streams, spread), expected, **close)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_that_keep_themselves_are_hunyuan_4s(dtype: torch.dtype) -> None:
    theirs = filled(HYV4HyperConnection(HYV4Config(**OPTIONS, hc_magnitude=1.7)))
    streams, y = torch.randn(T, N, C).to(dtype), torch.randn(T, C).to(dtype)
    x, spread = hyper_pre(streams, theirs.fn, theirs.base, theirs.scale, "diagonal", 1, 1e-3, 1e-2, 1.7)
    post, collapsed = (t[0] for t in theirs(streams[None]))
    torch.testing.assert_close(x, collapsed)
    expected = (post.unsqueeze(-1) * y.float().unsqueeze(1) + streams.float()).to(dtype)
    torch.testing.assert_close(hyper_post(y, streams, spread), expected)


@torch.no_grad()
def test_the_head_reads_a_sum_of_its_own() -> None:
    theirs = filled(DeepseekV4HyperHead(DeepseekV4Config(**OPTIONS)))
    streams = torch.randn(T, N, C)
    made = hyper_close(streams, theirs.hc_fn, theirs.hc_base, theirs.hc_scale, 1e-3, 1e-2)
    torch.testing.assert_close(made, theirs(streams[None])[0])


def test_every_stream_starts_as_the_embedding_and_an_unknown_kind_is_refused() -> None:
    x = torch.randn(T, C)
    assert torch.equal(hyper_open(x, N), torch.stack([x] * N, 1))
    with pytest.raises(ValueError, match="kind='mch' is not one of mhc, diagonal"):
        hyper_pre(torch.randn(T, N, C), torch.randn(6, N * C), torch.randn(6), torch.ones(2), "mch", 1, 0.1, 0.1, 1.0)
