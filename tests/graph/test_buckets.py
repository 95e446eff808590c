from hypothesis import given
from hypothesis import strategies as st

from treadle.graph.buckets import (
    MAX_CAPTURED_TOKENS,
    MIXED_TOKENS,
    PREFILL_TOKENS,
    Buckets,
    assign_buckets,
    largest_shape,
)
from treadle.graph.packet import StepShape


@given(max_num_seqs=st.integers(1, 700), num_seqs=st.integers(1, 700))
def test_any_number_of_decodes_fits_a_bucket_not_twice_as_large(max_num_seqs: int, num_seqs: int) -> None:
    num_seqs = min(num_seqs, max_num_seqs)
    exact = StepShape(num_seqs, num_seqs, num_seqs)
    found = assign_buckets(max_num_seqs, 8192).find(exact, decodes_only=True)
    assert found is not None
    assert found.num_tokens == found.num_seqs == found.num_rows
    assert num_seqs <= found.num_seqs <= min(max_num_seqs, max(2 * num_seqs - 1, 1))


@given(tokens=st.integers(2, 2400), seqs=st.integers(1, 300), max_num_seqs=st.integers(1, 256))
def test_a_mixed_step_gets_a_bucket_with_room_for_it(tokens: int, seqs: int, max_num_seqs: int) -> None:
    buckets = assign_buckets(max_num_seqs, 8192)
    exact = StepShape(tokens, min(seqs, tokens, max_num_seqs), 1)
    found = buckets.find(exact, decodes_only=False)
    if found is None:
        # Many chunks of hardly more than a token each, or more tokens than pay.
        assert tokens > MAX_CAPTURED_TOKENS or exact.num_seqs > MAX_CAPTURED_TOKENS // 2
        return
    assert found.num_tokens >= tokens
    assert found.num_rows == found.num_seqs >= exact.num_seqs
    # Equal numbers would mean one token each.
    assert found.num_seqs < found.num_tokens


def test_a_gpus_buckets() -> None:
    buckets = assign_buckets(256, 8192)
    assert [shape.num_seqs for shape in buckets.decode] == [1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16)]
    assert {shape.num_tokens for shape in buckets.mixed} == {*MIXED_TOKENS, *PREFILL_TOKENS}
    assert buckets.all[0] == (2048, 256, 256)
    assert list(buckets.all) == sorted(buckets.all, reverse=True)
    assert largest_shape(StepShape(8192, 256, 256), buckets) == (8192, 256, 256)
    assert largest_shape(StepShape(8, 2, 2), Buckets()) == (8, 2, 2)
