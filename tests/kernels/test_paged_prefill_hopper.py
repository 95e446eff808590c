"""The prefill kernel for Hopper: that it compiles, and on a GPU that it equals the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import Pages, starts
from triton_compile import compile_for_sm90

from treadle.kernels import paged_prefill_hopper, registry
from treadle.kernels.paged_attention_launch import paged_attention

REFERENCE = registry.reference("paged_attention").function


def test_every_variant_compiles_for_sm_90() -> None:
    compiled = compile_for_sm90(
        """
from treadle.kernels import paged_attention_launch
paged_attention_launch._processors = lambda device: 132
paged_attention_launch._capability = lambda device: (9, 0)

def launch(dtype, tokens, sequences, heads, kv_heads, dim, *options, page_tokens=16, sinks=None):
    sinks = None if sinks is None else torch.zeros(heads, dtype=dtype)
    paged_attention_launch.paged_attention(
        torch.zeros(tokens, heads, dim, dtype=dtype), torch.zeros(256, dtype=torch.uint8),
        torch.zeros(sequences, 4096, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32), torch.tensor(0), sinks, page_tokens, kv_heads, dim, 0.1,
        *options, pdl=True,
    )

launch(torch.bfloat16, 8192, 1, 32, 8, 128)
launch(torch.float16, 8192, 1, 28, 4, 128, 300, page_tokens=64)
launch(torch.bfloat16, 8192, 1, 9, 3, 64, 0, 20.0, page_tokens=8, sinks=True)
"""
    )
    assert [each["name"] for each in compiled] == ["prefill"] * 3
    assert all(each["wgmma"] for each in compiled)


BATCHES = {
    "chunk over a history": ([1300], [400], 0),
    "padded chunk": ([1300], [391], 9),
    "beside decodes and prompts": ([9, 1300, 40, 311, 128, 129], [1, 413, 1, 311, 128, 129], 3),
    "stopped and dead sequences": ([0, 250, 0, 333], [40, 200, 0, 101], 20),
    "short prompts": ([3, 2, 17, 16] * 20, [3, 2, 17, 16] * 20, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 8, 128)])
@pytest.mark.parametrize("options", [{}, {"window": 111}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_it_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, batch: str, options: dict[str, Any], heads: int, kv_heads: int, dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    lengths, counts, padding = BATCHES[batch]
    pages = Pages(lengths, kv_heads, dim, dim, 16, dtype)
    q = pages.randn(sum(counts) + padding, heads, dim)
    args = (
        q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset,
        pages.randn(heads) if options.get("sinks") else None, 16, kv_heads, dim, dim**-0.5, options.get("window", 0),
        options.get("softcap", 0.0),
    )  # fmt: skip
    on_device = [value.cuda() if isinstance(value, torch.Tensor) else value for value in args]
    monkeypatch.setattr("treadle.kernels.paged_attention_launch.for_hopper", lambda *_: True)
    launched = []
    launch = paged_prefill_hopper.launch
    monkeypatch.setattr(paged_prefill_hopper, "launch", lambda *a, **k: (launched.append(a), launch(*a, **k)))
    got = paged_attention(*on_device).cpu()
    assert launched
    torch.testing.assert_close(got, REFERENCE(*args), atol=2e-2, rtol=2e-2)
