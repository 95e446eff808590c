"""The kernels against the reference, over keys in pages with NaN wherever no token lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import latents
from pages import Pages, starts
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import registry
from treadle.kernels.paged_index_select_triton import paged_index_select

REFERENCE = registry.reference("paged_index_select").function
CPP = registry.named("paged_index_select.cpp").function


def arguments(
    pages: Pages, lengths: list[int], counts: list[int], heads: int, topk: int, padding: int = 0
) -> tuple[object, ...]:
    """Small whole numbers: sums are exact in any order, and equal scores are common."""
    rows = sum(counts) + padding
    q = torch.randint(-2, 3, (rows, heads * pages.k_dim + 8), generator=pages.random).to(pages.dtype)
    q = q[:, : heads * pages.k_dim].view(rows, heads, pages.k_dim)
    weights = torch.randint(-2, 4, (rows, heads), generator=pages.random).float()
    return (
        q, weights, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32),
        pages.layer_offset, pages.page_tokens, topk,
    )  # fmt: skip


def whole(lengths: list[int], dim: int, page_tokens: int, dtype: torch.dtype, seed: int = 0) -> Pages:
    """Pages of small whole numbers."""
    pages = latents(lengths, dim, page_tokens, dtype, seed)
    for sequence, keys in enumerate(pages.keys):
        keys.copy_(torch.randint(-2, 3, keys.shape, generator=pages.random))
        for position in range(len(keys)):
            pages.key_view(sequence, position // page_tokens)[:, position % page_tokens] = keys[position]
    return pages


def on(device: str, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in args)


def check(data: st.DataObject, device: str, function, longest: int) -> None:
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 33, 65, longest]), max_size=4))
    counts = [min(draw(1, 1, 2, 5, 20), length) or draw(0, 1) for length in lengths]
    dtype = draw(torch.float32, torch.bfloat16, torch.float16)
    pages = whole(lengths, draw(8, 24, 33), draw(1, 3, 16), dtype, data.draw(st.integers(0, 99)))
    args = arguments(pages, lengths, counts, draw(1, 5, 16), draw(1, 6, 100), draw(0, 2))
    assert torch.equal(function(*on(device, args)).cpu(), REFERENCE(*args))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_cpp_equals_the_reference(data: st.DataObject):
    check(data, "cpu", CPP, 300)


@settings(deadline=None, max_examples=12)
@given(st.data())
def interpreted_equals_the_reference(device: str, data: st.DataObject):
    blocks = data.draw(st.sampled_from([1, 5000, 1 << 20]))
    check(data, device, lambda *args: paged_index_select(*args, choice_bytes=blocks), 80)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_equals_the_reference(device: str):
    interpreted_equals_the_reference(device)


@pytest.mark.parametrize("function", [REFERENCE, CPP, paged_index_select])
def test_no_tokens_and_no_sequences(function):
    empty = whole([], 8, 4, torch.float32)
    assert function(*arguments(empty, [], [], 2, 3)).shape == (0, 3)
    assert function(*arguments(empty, [], [], 2, 3, padding=2)).eq(-1).all()


def test_the_kernels_arguments_pass_torchs_own_checks():
    args = arguments(whole([9], 8, 4, torch.float32), [9], [2], 2, 3)
    torch.library.opcheck(CPP, args, test_utils=("test_schema", "test_faketensor"))


def test_it_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from treadle.kernels import paged_index_select_triton
for dtype in (torch.bfloat16, torch.float32):
    paged_index_select_triton.paged_index_select(
        torch.zeros(3, 64, 128, dtype=dtype), torch.zeros(3, 64), torch.zeros(256, dtype=torch.uint8),
        torch.zeros(2, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32),
        torch.tensor(0), 16, 20, pdl=True,
    )
"""
    )
    assert [each["name"] for each in compiled] == ["rank_keys"] * 2
