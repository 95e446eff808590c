import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages, starts

from treadle.kernels import registry
from treadle.kernels.attention import attend

REFERENCE = registry.reference("paged_attention").function
CPP = registry.named("paged_attention.cpp").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def arguments(
    pages: Pages, lengths: list[int], counts: list[int], group: int = 3, window: int = 0, softcap: float = 0.0,
    sinks: bool = False, padding: int = 0, chunk: int = 0, alibi: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    """Queries are a slice of wider rows, as those of a fused projection are."""
    rows, heads = sum(counts) + padding, pages.kv_heads * group
    q = pages.randn(rows, heads * pages.k_dim + 5)[:, : heads * pages.k_dim].view(rows, heads, pages.k_dim)
    return (
        q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset,
        pages.randn(heads) if sinks else None, pages.page_tokens, pages.kv_heads, pages.v_dim, pages.k_dim**-0.5,
        window, softcap, chunk, torch.rand(heads, generator=pages.random) if alibi else None,
    )  # fmt: skip


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("function", [REFERENCE, CPP])
def test_it_is_attention_over_the_tokens_of_the_pages(function):
    lengths, counts = [9, 0, 40, 1], [2, 1, 7, 1]
    pages = Pages(lengths, 2, 16, 8, 4, torch.float32)
    args = arguments(pages, lengths, counts, window=11, softcap=3.0, sinks=True)
    out, q, at = function(*args), args[0], args[3].tolist()
    for s, (length, count) in enumerate(zip(lengths, counts)):
        rows = slice(at[s], at[s + 1])
        expected = attend(
            q[rows], pages.keys[s], pages.values[s], torch.arange(length - count, length), args[6], 0.25, 11, 3.0
        )
        torch.testing.assert_close(out[rows], expected if length else torch.zeros_like(expected))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cpp_equals_the_reference(data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 63, 65, 257, 300, 530]), max_size=4))
    counts = [min(data.draw(st.sampled_from([1, 1, 2, 5, 65, 140])), length) or draw(0, 1) for length in lengths]
    k_dim = draw(8, 16, 63, 64, 65, 128)
    pages = Pages(
        lengths,
        draw(1, 3),
        k_dim,
        draw(k_dim, 20),
        draw(1, 3, 16, 32),
        draw(*TOLERANCE),
        seed=data.draw(st.integers(0, 99)),
    )
    args = arguments(
        pages, lengths, counts, draw(1, 2, 3, 5), draw(0, 1, 17, 128), draw(0.0, 20.0), draw(False, True), draw(0, 2),
        draw(0, 0, 1, 50), draw(False, True),
    )  # fmt: skip
    close(CPP(*args), REFERENCE(*args))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 8, 71])
def test_many_query_heads_share_one_kv_head(dtype: torch.dtype, group: int):
    lengths, counts = [1000, 30], [1, 1]
    args = arguments(Pages(lengths, 1, 64, 64, 16, dtype), lengths, counts, group)
    close(CPP(*args), REFERENCE(*args))


@pytest.mark.parametrize("count", [1, 2])
def test_a_result_does_not_depend_on_the_batch_or_the_threads(count: int):
    lengths, counts = [700, 300, 12], [count, 90, 1]
    pages = Pages(lengths, 3, 64, 64, 16, torch.bfloat16)
    args = arguments(pages, lengths, counts)
    alone = (args[0][:count], args[1], args[2][:1], args[3][:2], args[4][:1], *args[5:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = CPP(*args)
        torch.set_num_threads(1)
        assert torch.equal(CPP(*args), together)
        assert torch.equal(CPP(*alone), together[:count])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("options", "reach"), [({"window": 20}, 20), ({"chunk": 60}, 30)])
def test_pages_that_no_query_sees_are_not_read(options: dict[str, int], reach: int):
    lengths = [200, 200]
    for counts in ([1, 1], [50, 50]):
        pages = Pages(lengths, 2, 16, 16, 4, torch.float32)
        args = arguments(pages, lengths, counts, **options)
        before = CPP(*args)
        first = (200 - counts[0] - reach) // 4
        pages.table[:, :first] = 0  # the scratch page, full of NaN here
        assert torch.equal(CPP(*args), before)


def test_no_tokens_and_no_sequences():
    args = arguments(Pages([], 2, 16, 16, 4, torch.float32), [], [])
    assert CPP(*args).shape == (0, 6, 16)
    assert CPP(*arguments(Pages([], 2, 16, 16, 4, torch.float32), [], [], padding=2)).eq(0).all()


def test_the_kernels_arguments_pass_torchs_own_checks():
    args = arguments(Pages([9], 2, 16, 16, 4, torch.float32), [9], [2])
    torch.library.opcheck(CPP, args, test_utils=("test_schema", "test_faketensor"))
