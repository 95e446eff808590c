"""The Triton kernels against the reference: interpreted here, natively on a GPU, compiled for sm_90 anywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages, starts
from torch import Tensor
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import paged_attention_invariant, registry
from treadle.kernels.paged_relative_attention_triton import paged_relative_attention

REFERENCE = registry.reference("paged_relative_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
WAYS = [{}, {"split": True}, {"invariant": True, "split": False}, {"invariant": True, "split": True}]
BATCHES = {
    "decode": ([9, 70, 1], [1, 1, 1], 0, 0),
    "decode behind windows": ([9, 0, 90, 0], [1, 1, 1, 0], 2, 11),
    "prompt": ([30], [30], 0, 0),
    "mixed, padded, with stopped sequences": ([9, 0, 13, 0, 90, 0], [1, 1, 13, 2, 4, 0], 5, 0),
    "mixed behind windows": ([9, 0, 13, 0, 90, 0], [1, 1, 13, 2, 4, 0], 5, 70),
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention_invariant, "SPAN", 64)
    monkeypatch.setattr(paged_attention_invariant, "JOINED", 2)


def arguments(
    pages: Pages, lengths: list[int], counts: list[int], group: int = 3, extent: int = 20, window: int = 0,
    padding: int = 0,
) -> tuple[object, ...]:  # fmt: skip
    """Queries are a slice of wider rows; what stands in the rows behind the last sequence is not a number."""
    rows, heads, width = sum(counts) + padding, pages.kv_heads * group, pages.k_dim
    q = pages.randn(rows, heads * width + 8)[:, : heads * width].view(rows, heads, width)
    bias = pages.randn(rows, heads, extent) * 2
    q[sum(counts) :], bias[sum(counts) :] = torch.nan, torch.nan
    return (
        q, bias, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32),
        pages.layer_offset, pages.page_tokens, pages.kv_heads, pages.v_dim, pages.k_dim**-0.5, window,
    )  # fmt: skip


def on(device: str, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in args)


def check(device: str, args: tuple[object, ...], **options: object) -> None:
    expected = REFERENCE(*args)
    got = paged_relative_attention(*on(device, args), **options).cpu()  # type: ignore[arg-type]
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(device: str, dtype: torch.dtype, batch: str) -> None:
    lengths, counts, padding, window = BATCHES[batch]
    args = arguments(Pages(lengths, 1, 24, 12, 4, dtype), lengths, counts, window=window, padding=padding)
    for options in WAYS if dtype is torch.float32 else WAYS[:1]:
        check(device, args, **options)


@settings(deadline=None, max_examples=12)
@given(st.data())
def interpreted_equals_the_reference(device: str, data: st.DataObject) -> None:
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 33, 65, 80]), max_size=3))
    counts = [min(draw(1, 1, 2, 9), length) or draw(0, 1) for length in lengths]
    k_dim = draw(8, 16, 31, 33)
    pages = Pages(
        lengths, draw(1, 2), k_dim, draw(k_dim, 20), draw(1, 3, 16), draw(*TOLERANCE), data.draw(st.integers(0, 99))
    )
    args = arguments(
        pages, lengths, counts, draw(1, 2, 3, 20), draw(1, 2, 17, 100), draw(0, 1, 17), draw(0, 2)
    )  # fmt: skip
    check(device, args, **draw(*WAYS))


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_equals_the_reference(device: str) -> None:
    interpreted_equals_the_reference(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("group", "window", "extent"), [(8, 0, 1024), (4, 512, 512)])
def test_the_sizes_of_models(device: str, group: int, window: int, extent: int) -> None:
    lengths, counts = [600, 5], [3, 2]
    args = arguments(Pages(lengths, 2, 128, 128, 16, torch.bfloat16), lengths, counts, group, extent, window)
    check(device, args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_pages_before_the_window_are_not_read(device: str, options: dict[str, bool]) -> None:
    for count in (1, 9):
        pages = Pages([90], 1, 16, 16, 4, torch.float32)
        args = arguments(pages, [90], [count], window=20)
        expected = paged_relative_attention(*on(device, args), **options)  # type: ignore[arg-type]
        assert expected.isfinite().all()
        pages.table[:, : (90 - count - 19) // 4] = 0  # the scratch page, full of NaN here
        assert torch.equal(paged_relative_attention(*on(device, args), **options), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 40])
def test_a_query_has_the_same_bits_however_it_is_computed(device: str, window: int) -> None:
    lengths, counts = [80, 30], [20, 1]
    args = on(device, arguments(Pages(lengths, 2, 24, 16, 4, torch.float32), lengths, counts, window=window))
    whole = paged_relative_attention(*args, invariant=True)  # type: ignore[arg-type]
    for row in (0, 19):
        one = slice(row, row + 1)
        alone = (
            args[0][one], args[1][one], args[2], args[3][:1], args[4].new_tensor([0, 1]),
            args[5].new_tensor([61 + row]), *args[6:],
        )  # fmt: skip
        for split in (False, True):
            assert torch.equal(paged_relative_attention(*alone, invariant=True, split=split), whole[one])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_no_sequences(device: str) -> None:
    empty = Pages([], 1, 16, 8, 4, torch.float32)
    assert paged_relative_attention(*on(device, arguments(empty, [], []))).shape == (0, 3, 8)
    for options in WAYS:
        made = paged_relative_attention(*on(device, arguments(empty, [], [], padding=9)), **options)
        assert made.eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_long_histories_are_split_as_far_as_they_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with room for more programs: spans get longer where those of SPAN keys take too much memory."""
    monkeypatch.setattr(paged_attention_invariant, "_processors", lambda device: 99)
    monkeypatch.setattr(paged_attention_invariant, "PARTIAL_BYTES", 2000)
    spans = []
    attend = paged_attention_invariant.attend

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]):
            def run(*args: object, **options: object) -> None:
                spans.append((options["SPAN"], grid[2]))
                attend[grid](*args, **options)

            return run

    monkeypatch.setattr(paged_attention_invariant, "attend", Seen())
    args = arguments(Pages([400], 1, 16, 16, 16, torch.float32), [400], [2])
    check(device, args)
    check(device, args, invariant=True)
    assert spans == [(128, 4), (64, 1)]


def test_every_step_compiles_for_sm_90() -> None:
    compiled = compile_for_sm90(
        """
from treadle.kernels.paged_relative_attention_triton import paged_relative_attention
for dtype, window, extent in ((torch.bfloat16, 0, 1024), (torch.float16, 512, 512), (torch.float32, 0, 1024)):
    for tokens, sequences in ((300, 7), (16, 16)):
        for options in ({"split": True}, {"invariant": True, "split": False}):
            paged_relative_attention(
                torch.empty(tokens, 64, 128, dtype=dtype), torch.empty(tokens, 64, extent, dtype=dtype),
                torch.empty(1 << 20, dtype=torch.uint8), torch.empty(sequences, 64, dtype=torch.int32),
                torch.empty(sequences + 1, dtype=torch.int32), torch.empty(sequences, dtype=torch.int32),
                torch.tensor(0), 16, 8, 128, 0.1, window, pdl=True, **options,
            )
"""
    )
    assert [each["name"] for each in compiled] == ["attend", "join", "attend"] * 6
    assert compiled[0]["wgmma"]
