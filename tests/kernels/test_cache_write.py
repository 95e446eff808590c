import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages

from treadle.kernels import registry

REFERENCE = registry.reference("cache_write").function
CPP = registry.named("cache_write.cpp").function
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPACITY = 40


def batch(pages: Pages, tokens: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(seq_ids, positions) of distinct places; every third row is stopped."""
    places = torch.randperm(sequences * CAPACITY, generator=pages.random)[:tokens]
    positions = places % CAPACITY
    positions[2::3] = -1
    return (places // CAPACITY).int(), positions


@pytest.mark.parametrize("function", [REFERENCE, CPP])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_lands_in_its_row_and_nothing_else_changes(function, dtype: torch.dtype):
    pages = Pages([0, 0], 3, 8, 5, 16, dtype, capacity=CAPACITY)
    seq_ids, positions = batch(pages, 20, 2)
    k, v = pages.randn(20, 3, 8), pages.randn(20, 3, 5)
    untouched = pages.arena.clone()
    function(k, v, pages.arena, pages.table, seq_ids, positions, pages.layer_offset, 16)
    for t, (s, p) in enumerate(zip(seq_ids.tolist(), positions.tolist())):
        if p >= 0:
            assert torch.equal(pages.key_view(s, p // 16)[:, p % 16], k[t])
            assert torch.equal(pages.value_view(s, p // 16)[:, p % 16], v[t])
            pages.key_view(s, p // 16)[:, p % 16] = float("nan")
            pages.value_view(s, p // 16)[:, p % 16] = float("nan")
    written = pages.arena.view(dtype).isnan() != untouched.view(dtype).isnan()
    assert not written.any()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 60), st.sampled_from([1, 3]), st.sampled_from([16, 63]), st.sampled_from([1, 3, 16]),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_cpp_writes_the_same_bytes(tokens: int, kv_heads: int, dim: int, page_tokens: int, dtype: torch.dtype):
    pages = Pages([0, 0], kv_heads, dim, 20, page_tokens, dtype, capacity=CAPACITY)
    seq_ids, positions = batch(pages, tokens, 2)
    # Slices of wider rows, as a fused projection gives.
    rows = pages.randn(tokens, kv_heads * (dim + 20))
    k, v = rows.split([kv_heads * dim, kv_heads * 20], -1)
    k, v = k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, 20)
    other = pages.arena.clone()
    REFERENCE(k, v, other, pages.table, seq_ids, positions, pages.layer_offset, page_tokens)
    CPP(k, v, pages.arena, pages.table, seq_ids, positions, pages.layer_offset, page_tokens)
    assert torch.equal(pages.arena, other)


def test_heads_that_are_not_contiguous_are_copied():
    pages = Pages([0], 2, 8, 8, 4, torch.float32, capacity=CAPACITY)
    k, v = (pages.randn(5, 8, 2).transpose(1, 2) for _ in range(2))
    rest = pages.table, torch.zeros(5, dtype=torch.int32), torch.arange(5), pages.layer_offset, 4
    other = pages.arena.clone()
    REFERENCE(k, v, other, *rest)
    CPP(k, v, pages.arena, *rest)
    assert torch.equal(pages.arena, other)
