"""Prefill whose tiles split their keys: right, in bounds, split where it was meant, for every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages, starts
from triton_mode import DEVICES

from treadle.kernels import paged_prefill_triton, registry
from treadle.kernels.paged_attention_launch import paged_attention
from treadle.kernels.paged_attention_tiles import PrefillTiles

REFERENCE = registry.reference("paged_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TILES = PrefillTiles(rows=16, block=16, warps=4, stages=2, occupancy=2, keys=32, waves=4)

BATCHES = {
    "chunk over a history": ([300], [12], 0),
    "padded chunk": ([300], [11], 5),
    "beside decodes": ([9, 300, 40, 31], [1, 13, 1, 1], 3),
    "beside another chunk and a prompt": ([200, 35, 160, 20], [9, 1, 20, 20], 0),
    "a stopped and a dead sequence": ([0, 250, 0, 33], [4, 10, 0, 1], 2),
    "a prompt from its start": ([150], [150], 0),
    "more sequences than a program sees together": ([3] * 130 + [200, 90], [1] * 130 + [8, 6], 2),
}


def arguments(
    batch: tuple[list[int], list[int], int], dtype: torch.dtype, group: int = 3, k_dim: int = 24, v_dim: int = 9,
    window: int = 0, softcap: float = 0.0, sinks: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    lengths, counts, padding = batch
    pages = Pages(lengths, 2, k_dim, v_dim, 4, dtype)
    q = pages.randn(sum(counts) + padding, 2 * group, k_dim)
    return (
        q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset,
        pages.randn(2 * group) if sinks else None, 4, 2, v_dim, k_dim**-0.5, window, softcap,
    )  # fmt: skip


def on(device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in args)


def check(device: str, args: tuple[Any, ...], tiles: PrefillTiles) -> None:
    expected, tolerance = REFERENCE(*args), TOLERANCE[args[0].dtype]
    got = paged_attention(*on(device, args), prefill=tiles).cpu()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_step(device: str, batch: str) -> None:
    check(device, arguments(BATCHES[batch], torch.float32), TILES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"window": 111}, {"softcap": 3.0}, {"sinks": True}])
@pytest.mark.parametrize("batch", ["beside decodes", "a stopped and a dead sequence"])
def test_every_option(device: str, options: dict[str, Any], batch: str) -> None:
    check(device, arguments(BATCHES[batch], torch.float32, **options), TILES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "group", "k_dim", "v_dim"),
    [(torch.float32, 1, 16, 16), (torch.bfloat16, 4, 31, 33), (torch.float16, 2, 72, 80)],
)
def test_every_dtype_and_size_of_heads(
    device: str, dtype: torch.dtype, group: int, k_dim: int, v_dim: int
) -> None:  # fmt: skip
    check(device, arguments(BATCHES["beside decodes"], dtype, group, k_dim, v_dim), TILES)


class Watched:
    """In place of prefill: the same with workspace that ends in a guard."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.guards: list[torch.Tensor] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(q: torch.Tensor, out: torch.Tensor, *args: Any, **constants: Any) -> None:
            *workspace, rest = args[0], args[1], args[2:]
            padded = [part.new_full((part.numel() + 4096,), float("nan")) for part in workspace]
            self.guards += [whole[part.numel() :] for whole, part in zip(padded, workspace)]
            self.kernel[grid](q, out, *padded, *rest, **constants)

        return launch


class Left:
    """In place of join: nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: None


def split_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, args: tuple[Any, ...], tiles: PrefillTiles
) -> list[bool]:  # fmt: skip
    """Return for each row of a step whether its tile was split; no split may lie outside the workspace."""
    watched = Watched(paged_prefill_triton.prefill)
    with monkeypatch.context() as patch:
        patch.setattr(paged_prefill_triton, "prefill", watched)
        patch.setattr(paged_prefill_triton, "join", Left())
        out = paged_attention(*on(device, args), prefill=tiles)
    assert watched.guards
    assert all(guard.isnan().all() for guard in watched.guards)
    return [bool(row.isnan().all()) for row in out]  # what is made without a value is full of NaN in these tests


@pytest.mark.parametrize("device", DEVICES)
def test_only_long_histories_are_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(([9, 300, 40, 31], [1, 13, 8, 1], 3), torch.float32)
    assert split_rows(monkeypatch, device, args, TILES) == [False] + [True] * 13 + [False] * (8 + 1 + 3)
    args = arguments(([300], [12], 0), torch.float32, window=40)
    assert not any(split_rows(monkeypatch, device, args, TILES))


@settings(deadline=None, max_examples=25)
@given(st.data())
def splits_stay_in_their_workspace(device: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    def draw(*choices: int) -> int:
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 20, 70, 150]), min_size=1, max_size=3))
    counts = [min(draw(1, 9, 33), length) for length in lengths]
    counts[0] = max(counts[0], 9)
    tiles = PrefillTiles(
        rows=16, block=16, warps=4, stages=2, occupancy=draw(1, 2), keys=draw(5, 16), waves=draw(1, 2, 5)
    )
    split_rows(monkeypatch, device, arguments((lengths, counts, draw(0, 9)), torch.float32, draw(1, 3)), tiles)


@pytest.mark.parametrize("device", DEVICES)
def test_splits_stay_in_their_workspace(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_stay_in_their_workspace(device, monkeypatch)
