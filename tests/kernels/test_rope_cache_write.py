import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages

from treadle.graph.target import Target
from treadle.kernels import registry

REFERENCE = registry.reference("rope_cache_write").function
CPP = registry.named("rope_cache_write.cpp").function
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CAPACITY = 40


def arguments(
    tokens: int, heads: int, kv_heads: int, dim: int, v_dim: int, rotated: int, page_tokens: int, dtype: torch.dtype
) -> tuple[Pages, list[object]]:
    pages = Pages([0, 0], kv_heads, dim, v_dim, page_tokens, dtype, capacity=CAPACITY)
    places = torch.randperm(2 * CAPACITY, generator=pages.random)[:tokens]
    positions = places % CAPACITY
    positions[1::4] = -1
    widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
    q, k, v = pages.randn(tokens, sum(widths)).split(widths, -1)
    table = torch.randn(CAPACITY, rotated, generator=pages.random)
    return pages, [
        q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, v_dim), table,
        pages.arena, pages.table, (places // CAPACITY).int(), positions, pages.layer_offset, page_tokens,
    ]  # fmt: skip


@pytest.mark.parametrize("function", [REFERENCE, CPP])
def test_it_is_rope_and_cache_write(function):
    pages, args = arguments(9, 6, 2, 16, 12, 8, 4, torch.float32)
    q, k, v, table, arena, *rest = args
    positions, other = args[7], pages.arena.clone()
    expected = torch.ops.treadle.rope(q, positions, table, "interleaved", "tail")
    torch.ops.treadle.cache_write(torch.ops.treadle.rope(k, positions, table, "interleaved", "tail"), v, other, *rest)
    torch.testing.assert_close(function(*args, "interleaved", "tail"), expected)
    torch.testing.assert_close(arena.view(torch.float32), other.view(torch.float32), equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cpp_equals_the_reference(data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    kv_heads, dim = draw(1, 3), draw(16, 63, 64, 65, 96)
    pages, args = arguments(
        draw(0, 1, 2, 50), kv_heads * draw(1, 3), kv_heads, dim, draw(dim, 20), draw(dim // 2 * 2, dim // 4 * 2),
        draw(1, 3, 16), draw(*TOLERANCE),
    )  # fmt: skip
    choice = draw("half", "interleaved", "half_neg"), draw("head", "tail")
    other = list(args)
    other[4] = pages.arena.clone()
    tolerance = TOLERANCE[pages.dtype]
    torch.testing.assert_close(CPP(*args, *choice), REFERENCE(*other, *choice), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        pages.arena.view(pages.dtype), other[4].view(pages.dtype), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def test_a_table_in_low_precision_is_left_to_the_reference():
    target = Target(device="cpu", dtype="bfloat16")
    low = {"dtypes": {"q": torch.bfloat16, "k": torch.bfloat16, "v": torch.bfloat16, "table": torch.bfloat16}}
    assert [one.name for one in registry.candidates("rope_cache_write", target, low)] == ["rope_cache_write.reference"]
    low["dtypes"]["table"] = torch.float32
    assert registry.candidates("rope_cache_write", target, low)[0].name == "rope_cache_write.cpp"
