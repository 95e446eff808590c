"""Latent attention for Hopper: that it compiles and is chosen, and on a GPU that it equals the exact result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from latents import CAPTURED, REAL_BATCHES, check_captured, check_real
from triton_compile import compile_for_sm90

from treadle.graph.workspace import PARTIAL_BYTES
from treadle.kernels import latent_attention_hopper, latent_attention_launch
from treadle.kernels.latent_attention_launch import HOPPER_TILES, for_hopper, paged_latent_attention


def test_every_variant_compiles_for_sm_90() -> None:
    compiled = compile_for_sm90(
        """
from treadle.kernels import latent_attention_launch
latent_attention_launch._processors = lambda device: 132
latent_attention_launch._capability = lambda device: (9, 0)

def launch(dtype, tokens, sequences, heads, page_tokens=16, sinks=None, k_dim=576, pages=512, **more):
    sinks = None if sinks is None else torch.zeros(heads, dtype=dtype)
    latent_attention_launch.paged_latent_attention(
        torch.zeros(tokens, heads, k_dim, dtype=dtype), torch.zeros(1 << 20, dtype=torch.uint8),
        torch.zeros(sequences, pages, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32), torch.tensor(0), sinks, page_tokens, 0.1, 512, pdl=True, **more,
    )

launch(torch.bfloat16, 64, 64, 128)                                  # attend, join
launch(torch.float16, 500, 3, 100, page_tokens=128, sinks=True)      # attend, join
launch(torch.bfloat16, 64, 64, 16, page_tokens=8, pages=8)           # attend: too few keys for a second split
"""
    )
    assert [each["name"] for each in compiled] == ["attend", "join"] * 2 + ["attend"]
    assert [each["wgmma"] for each in compiled] == [True, False] * 2 + [True]


def test_it_takes_what_it_is_written_for() -> None:
    for page_tokens in (8, 16, 64, 128):
        assert for_hopper(576, 512, 2, page_tokens, (9, 0))
    assert not for_hopper(576, 512, 2, 12, (9, 0))
    assert not for_hopper(576, 512, 4, 16, (9, 0))
    assert not for_hopper(288, 256, 2, 16, (9, 0))
    assert not for_hopper(576, 512, 2, 16, (10, 0))
    assert not for_hopper(576, 512, 2, 16, (0, 0))


@pytest.mark.parametrize("processors", [1, 132, 1000])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (64, 64), (512, 512), (8192, 3)])
def test_its_splits_fit_the_workspace_that_was_planned(tokens: int, sequences: int, processors: int) -> None:
    plan = latent_attention_launch._plan(
        HOPPER_TILES, tokens, sequences, 128, latent_attention_hopper.V_DIM, 0, 1 << 17, False, processors
    )  # fmt: skip
    assert 0 < plan.programs <= processors
    assert plan.splits * HOPPER_TILES.rows * (latent_attention_hopper.V_DIM + 2) * 4 <= PARTIAL_BYTES


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose steps do not go to the kernel."""
    calls = []
    launch = latent_attention_hopper.launch
    monkeypatch.setattr(latent_attention_hopper, "launch", lambda *a, **k: (calls.append(a), launch(*a, **k)))
    monkeypatch.setattr(latent_attention_launch, "for_hopper", lambda *_: True)
    yield
    assert calls


@pytest.mark.gpu
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("batch", REAL_BATCHES)
@pytest.mark.parametrize(
    ("heads", "dtype", "page_tokens", "sinks"),
    [
        (128, torch.bfloat16, 16, False),
        (100, torch.float16, 64, True),
        (16, torch.bfloat16, 8, False),
        (128, torch.bfloat16, 128, True),
    ],
)
def test_it_equals_the_exact_result(
    batch: str, heads: int, dtype: torch.dtype, page_tokens: int, sinks: bool
) -> None:  # fmt: skip
    check_real(paged_latent_attention, batch, heads, 576, 512, dtype, page_tokens, sinks)


@pytest.mark.gpu
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("batches", CAPTURED)
def test_a_captured_step_serves_any_lengths(batches: tuple[list[int], list[int]]) -> None:
    check_captured(paged_latent_attention, batches, 128)
