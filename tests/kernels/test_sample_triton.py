"""The kernels that draw tokens against the sampler in plain torch: the same tokens from the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import sample_triton
from treadle.kernels.sample import token_kernels
from treadle.runtime.sampler import Needs, RowParams, sample

EVERYTHING = Needs(sampled=True, top_k=1 << 20, top_p=True, min_p=True, masked=True)
INFINITE = float("inf")


def params(count: int, **values: object) -> RowParams:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "token_index": 0, "min_left": 0}
    reals = ("temperature", "top_p", "min_p")
    columns = {
        name: torch.as_tensor(values.get(name, [value] * count), dtype=torch.float32 if name in reals else torch.int64)
        for name, value in defaults.items()
    }
    return RowParams(**columns, stops=torch.as_tensor(values.get("stops", [[-1]] * count), dtype=torch.int64))


def random_params(count: int, vocab: int, most: int, generator: torch.Generator) -> RowParams:
    """Every mixture of cuts, as views of one wide table, which is how the slots keep them."""

    def uniform() -> torch.Tensor:
        return torch.rand(count, generator=generator)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (count, *shape), generator=generator)

    table = torch.zeros(count, 48, dtype=torch.int64)
    reals = table.view(torch.float32)
    reals[:, 16] = torch.where(uniform() < 0.15, 0.0, uniform() * 1.5 + 0.1)
    reals[:, 18] = torch.where(uniform() < 0.5, 1.0, uniform())
    reals[:, 20] = torch.where(uniform() < 0.6, 0.0, uniform() * 0.2)
    table[:, 7] = torch.where(uniform() < 0.5, 0, integers(1, most))
    table[:, 6], table[:, 5], table[:, 4] = integers(-(2**62), 2**62), integers(0, 99), integers(0, 2)
    table[:, 24:29] = torch.where(uniform() < 0.3, -1, integers(0, vocab, 5).T).T
    return RowParams(
        temperature=reals[:, 16],
        top_k=table[:, 7],
        top_p=reals[:, 18],
        min_p=reals[:, 20],
        seed=table[:, 6],
        token_index=table[:, 5],
        min_left=table[:, 4],
        stops=table[:, 24:29],
    )


def on(device: str, rows: RowParams) -> RowParams:
    return RowParams(*(column.to(device) for column in rows))


def check(device: str, logits: torch.Tensor, rows: RowParams) -> torch.Tensor:
    expected = sample(logits, rows, EVERYTHING._replace(top_k=int(rows.top_k.max()) if len(logits) else 0)).tokens
    tokens = sample_triton.draw(logits.to(device), on(device, rows)).cpu()
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected.tolist()
    return tokens


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([1, 7, 700, 4096, 5000]),
    scale=st.sampled_from([0.3, 3.0]),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_it_draws_what_the_sampler_draws(
    device: str, seed: int, vocab: int, scale: float, ties: bool, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, vocab, generator=generator) * scale).to(dtype)
    if ties:
        logits = (logits * 2).round() / 2
    check(device, logits, random_params(6, vocab, 50, generator))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_too_flat_to_be_held_are_drawn_all_the_same(device: str):
    generator = torch.Generator().manual_seed(0)
    vocab = 3 * sample_triton.HELD
    logits = torch.randn(5, vocab, generator=generator) * 0.1
    logits[4] = 0
    rows = params(
        5, top_p=[0.9, 1.0, 0.8, 0.5, 0.9], min_p=[0.0, 0.3, 0.5, 0.0, 0.0], top_k=[0, 0, 9000, 8000, 0],
        seed=range(5), stops=[[int(logits[0].argmax())]] * 5, min_left=[1, 0, 0, 0, 0],
    )  # fmt: skip
    tokens = check(device, logits, rows)
    assert len(set(tokens.tolist())) > 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_in_many_draws_keeps_what_the_sampler_keeps(device: str):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)) * 2
    draws = 24
    rows = params(draws, top_k=[7] * draws, top_p=[0.9] * draws, token_index=range(draws))
    tokens = check(device, logits.expand(draws, -1), rows)
    assert 2 < len(tokens.unique()) <= 7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", [{}, {"top_k": [2] * 6}, {"top_p": [0.5] * 6}, {"min_p": [1.0] * 6}])
def test_bad_logits_are_marked_and_spare_the_others(device: str, cut: dict[str, list[float]]):
    logits = torch.zeros(6, 9)
    logits[:, 3] = 50.0
    logits[0, 5], logits[2], logits[4] = float("nan"), INFINITE, -INFINITE
    expected = [-1, 3, -1, 3, -1, 3]
    for temperature in (0.0, 1.0):
        rows = params(6, temperature=[temperature] * 6, **cut)
        assert sample_triton.draw(logits.to(device), on(device, rows)).tolist() == expected
    assert sample_triton.greedy(logits.to(device)).tolist() == expected


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")
@pytest.mark.parametrize("device", DEVICES)
def test_huge_and_forbidden_logits(device: str):
    logits = torch.tensor([[1e38, -3e38, 9e37, 1e38], [-INFINITE, 2.0, -INFINITE, 1.0], [-0.0, 0.0, -1e-3, -5.0]])
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (1, 1.0, 0.0), (3, 0.7, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.9)):
        for index in range(4):
            rows = params(3, top_k=[top_k] * 3, top_p=[top_p] * 3, min_p=[min_p] * 3, token_index=[index] * 3)
            check(device, logits, rows)


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 6e-38, 1e-5])
def test_a_temperature_near_0_takes_the_best(device: str, temperature: float):
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(6)) * 9
    cuts = {"top_k": [0, 9, 0, 0, 4999], "top_p": [1.0, 1.0, 0.9, 1.0, 1.0], "min_p": [0.0, 0.0, 0.0, 0.1, 0.0]}
    tokens = check(device, logits, params(5, temperature=[temperature] * 5, **cuts))
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_stops_are_forbidden_until_min_tokens(device: str):
    logits = torch.tensor([[1.0, 9.0, 8.0, 0.0]]).repeat(3, 1)
    rows = params(3, temperature=[0.0] * 3, min_left=[1, 0, 5], stops=[[1, 2, 1], [1, 2, 1], [-1, -1, -1]])
    assert check(device, logits, rows).tolist() == [0, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_first_largest(device: str, dtype: torch.dtype):
    logits = torch.randn(4, 9001, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, [17, 5000]] = 9.0
    tokens = sample_triton.greedy(logits.to(device)).cpu()
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [17, *logits[1:].argmax(-1).tolist()]
    wide = torch.cat([logits, logits], 1)[:, :9001]
    assert sample_triton.greedy(wide.to(device)).tolist() == tokens.tolist()
    assert sample_triton.greedy(logits[:0].to(device)).tolist() == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_sampler_uses_the_kernels_that_it_is_given(device: str):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    rows = params(5, temperature=[0.0, 1.0, 1.0, 0.7, 0.0], top_k=[0, 3, 0, 0, 0], seed=range(5))
    for needs in (Needs(), Needs(logprobs=2), Needs(sampled=True, top_k=3), Needs(sampled=True, top_k=3, logprobs=0)):
        expected = sample(logits, rows, needs)
        found = sample(logits.to(device), on(device, rows), needs, sample_triton)
        for mine, theirs in zip(found, expected):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine.cpu(), theirs)


def test_who_has_kernels():
    assert token_kernels("cpu") is None
    assert token_kernels("cuda") is sample_triton


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels import sample_triton
from treadle.runtime.sampler import RowParams
table = torch.zeros(4, 48, dtype=torch.int64)
reals = table.view(torch.float32)[:, 0]
rows = RowParams(reals, table[:, 0], reals, reals, table[:, 0], table[:, 0], table[:, 0], table[:, 16:])
for dtype in (torch.bfloat16, torch.float32):
    logits = torch.zeros(4, 151936, dtype=dtype)
    sample_triton.draw(logits, rows)
    sample_triton.greedy(logits)
""")
    names = ["chunk_peaks", "row_bounds", "gather", "gather", "draw_row", "chunk_peaks", "take_best"]
    assert [each["name"] for each in compiled] == names * 2
