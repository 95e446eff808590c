"""The Triton kernels against the reference: interpreted here, natively on a GPU, compiled for sm_90 anywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages
from side_keys import arguments
from torch import Tensor
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import paged_block_attention_triton, registry
from treadle.kernels.paged_block_attention_triton import paged_block_attention

REFERENCE = registry.reference("paged_block_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BATCHES = {
    "decode": ([9, 70, 1], [1, 1, 1], 0),
    "prompt": ([21], [21], 0),
    "mixed, padded, with stopped sequences": ([9, 0, 13, 0, 70, 0], [1, 1, 9, 2, 3, 0], 3),
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_block_attention_triton, "SPAN", 64)


def on(device: str, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in args)


def check(device: str, args: tuple[object, ...], **options: object) -> None:
    expected = REFERENCE(*args)
    got = paged_block_attention(*on(device, args), **options).cpu()  # type: ignore[arg-type]
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(device: str, dtype: torch.dtype, batch: str) -> None:
    lengths, counts, padding = BATCHES[batch]
    args = arguments(Pages(lengths, 1, 24, 12, 4, dtype), lengths, counts, block=10, topk=7, padding=padding)
    check(device, args, split=False)
    check(device, args, split=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "index_heads"), [(2, 2, 4), (4, 1, 2), (1, 6, 3), (3, 2, 2), (1, 17, 1), (2, 1, 1)]
)
def test_index_heads_are_shared_in_another_way_than_kv_heads(
    device: str, kv_heads: int, group: int, index_heads: int
) -> None:
    args = arguments(Pages([41], kv_heads, 16, 8, 4, torch.float32), [41], [2], group, index_heads)
    check(device, args)


@settings(deadline=None, max_examples=10)
@given(st.data())
def interpreted_equals_the_reference(device: str, data: st.DataObject) -> None:
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 33, 65]), max_size=3))
    counts = [min(draw(1, 1, 2, 5), length) or draw(0, 1) for length in lengths]
    k_dim = draw(8, 16, 31, 33)
    pages = Pages(
        lengths, draw(1, 2), k_dim, draw(k_dim, 20), draw(1, 3, 16), draw(*TOLERANCE), data.draw(st.integers(0, 99))
    )
    args = arguments(
        pages,
        lengths,
        counts,
        draw(2, 6),
        draw(1, 2),
        draw(3, 8),
        draw(1, 7, 16),
        draw(1, 3, 20),
        draw(0, 1),
        draw(0, 2),
    )
    check(device, args, split=draw(False, True), choice_bytes=draw(1, 3000, 1 << 20))


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_equals_the_reference(device: str) -> None:
    interpreted_equals_the_reference(device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_of_models(device: str) -> None:
    lengths, counts = [700, 5], [2, 2]
    pages = Pages(lengths, 2, 128, 128, 16, torch.bfloat16)
    check(device, arguments(pages, lengths, counts, 16, 2, 128, 128, 3, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_however_it_is_computed(device: str, dtype: torch.dtype) -> None:
    lengths, counts = [90, 30], [12, 1]
    args = on(device, arguments(Pages(lengths, 2, 24, 16, 4, dtype), lengths, counts, block=10, topk=7))
    whole = paged_block_attention(*args, invariant=True)
    for row in (0, 11):
        one = slice(row, row + 1)
        alone = (
            args[0][one], args[1][one], args[2], args[3][:1], args[4].new_tensor([0, 1]),
            args[5].new_tensor([79 + row]), *args[6:],
        )  # fmt: skip
        for split in (False, True):
            assert torch.equal(paged_block_attention(*alone, invariant=True, split=split), whole[one])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_no_sequences(device: str) -> None:
    empty = Pages([], 1, 16, 8, 4, torch.float32)
    assert paged_block_attention(*on(device, arguments(empty, [], []))).shape == (0, 4, 8)
    for split in (False, True):
        made = paged_block_attention(*on(device, arguments(empty, [], [], padding=9)), split=split)
        assert made.eq(0).all()


def test_every_step_compiles_for_sm_90() -> None:
    compiled = compile_for_sm90(
        """
from treadle.kernels.paged_block_attention_triton import paged_block_attention
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for tokens, sequences, split in ((300, 7, False), (16, 16, True)):
        paged_block_attention(
            torch.empty(tokens, 64, 128, dtype=dtype), torch.empty(tokens, 4, 128, dtype=dtype),
            torch.empty(1 << 20, dtype=torch.uint8), torch.empty(sequences, 640, dtype=torch.int32),
            torch.empty(sequences + 1, dtype=torch.int32), torch.empty(sequences, dtype=torch.int32),
            torch.tensor(0), torch.tensor(0), 16, 4, 128, 0.1, 128, 16, 1, pdl=True, split=split,
        )
"""
    )
    names = ["rank_blocks", "attend_blocks", "rank_blocks", "attend_blocks", "join_blocks"]
    assert [each["name"] for each in compiled] == names * 3
