import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import arguments, latents
from pages import starts

from treadle.kernels import registry
from treadle.kernels.latent_attention import attend

REFERENCE = registry.reference("paged_latent_attention").function
CPP = registry.named("paged_latent_attention.cpp").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("function", [REFERENCE, CPP])
def test_it_is_attention_over_the_tokens_of_the_pages(function):
    lengths, counts = [9, 0, 40, 1], [2, 1, 7, 1]
    pages = latents(lengths, 24, 4, torch.float32)
    args = arguments(pages, lengths, counts, v_dim=16, window=11, sinks=True)
    out, q, at = function(*args), args[0], args[3].tolist()
    for s, (length, count) in enumerate(zip(lengths, counts)):
        rows = slice(at[s], at[s + 1])
        where = torch.arange(length - count, length)
        expected = attend(q[rows], pages.keys[s][:, 0], where, args[6], 24**-0.5, 16, 11, None)
        torch.testing.assert_close(out[rows], expected if length else torch.zeros_like(expected))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_cpp_equals_the_reference(data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 63, 65, 257, 1030]), max_size=4))
    counts = [min(data.draw(st.sampled_from([1, 1, 2, 5, 65])), length) or draw(0, 1) for length in lengths]
    k_dim = draw(8, 24, 63, 72, 80)
    pages = latents(lengths, k_dim, draw(1, 3, 16, 32), draw(*TOLERANCE), data.draw(st.integers(0, 99)))
    choices = 0 if any(count > length for count, length in zip(counts, lengths)) else draw(0, 0, 5, 70)
    args = arguments(
        pages, lengths, counts, draw(1, 3, 5, 16, 100), draw(8, k_dim - 5, k_dim),
        0 if choices else draw(0, 1, 17, 300), draw(False, True), draw(0, 2), choices,
    )  # fmt: skip
    close(CPP(*args), REFERENCE(*args))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_sizes_of_deepseek(dtype: torch.dtype):
    lengths, counts = [1500, 30], [1, 3]
    args = arguments(latents(lengths, 576, 16, dtype), lengths, counts, 128, 512)
    close(CPP(*args), REFERENCE(*args))


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"choices": 40}])
def test_a_row_does_not_depend_on_the_batch_the_threads_or_the_chunk(options: dict[str, int]):
    lengths, counts = [2500, 300, 12], [40, 90, 1]
    pages = latents(lengths, 40, 16, torch.bfloat16)
    args = arguments(pages, lengths, counts, 5, 32, **options)
    one = slice(39, 40)
    alone = (
        args[0][one], args[1], args[2][:1], starts([1]), args[4][:1], *args[5:11],
        None if args[11] is None else args[11][one],
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = CPP(*args)
        assert torch.equal(CPP(*alone), together[one])
        torch.set_num_threads(1)
        assert torch.equal(CPP(*args), together)
        assert torch.equal(CPP(*alone), together[one])
    finally:
        torch.set_num_threads(threads)


def test_pages_that_no_query_sees_are_not_read():
    for counts in ([1, 1], [50, 50]):
        pages = latents([200, 200], 24, 4, torch.float32)
        args = arguments(pages, [200, 200], counts, window=20)
        before = CPP(*args)
        assert before.isfinite().all()
        pages.table[:, : (200 - counts[0] - 20) // 4] = 0  # the scratch page, full of NaN here
        assert torch.equal(CPP(*args), before)


def test_no_tokens_and_no_sequences():
    args = arguments(latents([], 24, 4, torch.float32), [], [])
    assert CPP(*args).shape == (0, 3, 8)
    assert CPP(*arguments(latents([], 24, 4, torch.float32), [], [], padding=2)).eq(0).all()


def test_the_kernels_arguments_pass_torchs_own_checks():
    args = arguments(latents([9], 24, 4, torch.float32), [9], [2])
    torch.library.opcheck(CPP, args, test_utils=("test_schema", "test_faketensor"))
