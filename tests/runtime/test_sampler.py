from __future__ import annotations

import numpy as np
import pytest
import torch
from controls import random_controls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treadle.kernels.adjust_logits import adjust_logits
from treadle.runtime import sampler
from treadle.runtime.sampler import Changes, Needs, RowParams, sample, score, uniforms


def rows(count: int, **values: list[float] | Tensor) -> RowParams:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values.get(name, [default] * count), dtype=dtype)

    whole, real = torch.int64, torch.float32
    return RowParams(
        temperature=column("temperature", 1.0, real),
        top_k=column("top_k", 0, whole),
        top_p=column("top_p", 1.0, real),
        min_p=column("min_p", 0.0, real),
        seed=column("seed", 0, whole),
        token_index=column("token_index", 0, whole),
        min_left=column("min_left", 0, whole),
        stops=torch.as_tensor(values.get("stops", [[-1]] * count), dtype=whole),
    )


EVERYTHING = Needs(sampled=True, top_k=8, top_p=True, min_p=True, masked=True, logprobs=3)


def oracle_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the probabilities to draw from, one step after the other, by sorting."""

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max())
        return e / e.sum()

    scaled = logits.astype(np.float64) / temperature
    probs = softmax(scaled)
    scaled = np.where(probs < min_p * probs.max(), -np.inf, scaled)
    if top_k:
        scaled = np.where(scaled < np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], -np.inf, scaled)
    if top_p < 1:
        probs = softmax(scaled)
        order = np.argsort(-probs)
        reached = np.searchsorted(np.cumsum(probs[order]), top_p)
        scaled = np.where(probs < probs[order][min(reached, len(order) - 1)], -np.inf, scaled)
    return softmax(scaled)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 8]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_draws_follow_the_distribution(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    draws, vocab = 3000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    expected = oracle_kept(logits[0].numpy(), temperature, top_k, top_p, min_p)
    params = rows(
        draws,
        temperature=[temperature] * draws,
        top_k=[top_k] * draws,
        top_p=[top_p] * draws,
        min_p=[min_p] * draws,
        seed=[seed] * draws,
        token_index=torch.arange(draws),
    )
    tokens = sample(logits.expand(draws, vocab), params, EVERYTHING).tokens
    found = np.bincount(tokens.numpy(), minlength=vocab) / draws
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    # Five standard deviations of a frequency.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-3)


def test_uniforms_are_uniform_and_differ_by_seed_and_index() -> None:
    index = torch.arange(20_000)
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        values = uniforms(torch.full_like(index, seed), index)
        assert values.min() >= 0
        assert values.max() < 1
        assert abs(values.mean() - 0.5) < 0.01
        assert abs(values.var() - 1 / 12) < 0.002
        counts = torch.histc(values, bins=20, min=0, max=1)
        assert (counts - 1000).abs().max() < 160
    # Neighbouring seeds are not shifted copies of one another.
    grid = uniforms(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert len(grid.unique()) == 10_000


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 6))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 700, generator=generator) * 3

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    params = rows(
        count,
        temperature=uniform(0, 2) * (uniform(0, 1) > 0.3),
        top_k=torch.randint(0, 9, (count,), generator=generator),
        top_p=uniform(0.2, 1),
        min_p=uniform(0, 0.1),
        seed=torch.randint(0, 2**40, (count,), generator=generator),
        token_index=torch.randint(0, 50, (count,), generator=generator),
        min_left=torch.randint(0, 2, (count,), generator=generator),
        stops=torch.randint(0, 700, (count, 4), generator=generator),
    )
    together = sample(logits, params, EVERYTHING)
    for row in range(count):
        one = RowParams(*(each[row : row + 1] for each in params))
        lean = EVERYTHING._replace(
            sampled=bool(one.temperature > 0),
            top_k=int(one.top_k),
            masked=bool(one.min_left > 0),
            logprobs=None,
        )
        assert sample(logits[row : row + 1], one, lean).tokens.item() == together.tokens[row].item()


@pytest.mark.parametrize("temperature", [1.0, 50.0])
def test_top_p_of_a_flat_distribution_looks_beyond_the_first_candidates(temperature: float) -> None:
    vocab = sampler.FIRST_CANDIDATES * 20
    logits = torch.linspace(0, 1, vocab).view(1, -1)
    draws = 2000
    params = rows(
        draws,
        temperature=[temperature] * draws,
        top_p=[0.9] * draws,
        token_index=torch.arange(draws),
    )
    tokens = sample(logits.expand(draws, vocab), params, Needs(sampled=True, top_p=True)).tokens
    kept = np.flatnonzero(oracle_kept(logits[0].numpy(), temperature, 0, 0.9, 0.0))
    assert abs(int(tokens.min()) - kept[0]) < 0.02 * vocab
    assert int(tokens.min()) >= kept[0] - 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 6e-38, 1e-20, 1e-5])
@pytest.mark.parametrize("needs", [Needs(sampled=True), EVERYTHING])
def test_a_temperature_near_0_takes_the_best(temperature: float, needs: Needs) -> None:
    logits = torch.tensor([[1.0, 30.0, 20.0, -torch.inf], [-3.0, -2.0, -1.0, -4.0]])
    params = rows(2, temperature=[temperature] * 2, top_p=[0.9] * 2, top_k=[2, 0], min_p=[0.1] * 2)
    assert sample(logits, params, needs).tokens.tolist() == [1, 2]


def test_tied_best_tokens_are_drawn_alike_at_a_temperature_near_0() -> None:
    draws = 200
    params = rows(draws, temperature=[1e-40] * draws, token_index=torch.arange(draws))
    tokens = sample(torch.tensor([[9.0, 30.0, 30.0]]).expand(draws, -1), params, Needs(sampled=True)).tokens
    assert 60 < int((tokens == 1).sum()) < 140
    assert set(tokens.tolist()) == {1, 2}


def test_greedy_rows_take_the_first_maximum_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [0.0, 5.0, 5.0]])
    params = rows(2, temperature=[0.0, 1.0], token_index=[0, 3])
    assert sample(logits, params, Needs()).tokens.tolist() == [1, 1]
    assert sample(logits, params, EVERYTHING).tokens[0] == 1


def test_stops_are_forbidden_until_min_tokens() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 0.0]]).repeat(3, 1)
    params = rows(3, temperature=[0.0] * 3, min_left=[1, 0, 5], stops=[[1, 2, 1], [1, 2, 1], [-1, -1, -1]])
    result = sample(logits, params, EVERYTHING)
    assert result.tokens.tolist() == [0, 1, 1]
    assert logits[0].tolist() == [1.0, 9.0, 8.0, 0.0]


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 0.0]])
    params = rows(1, temperature=[0.01], min_left=[1], stops=[[1]])
    result = sample(logits, params, EVERYTHING)
    expected = logits.log_softmax(-1)[0]
    assert result.logprobs is not None
    assert result.ranks is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.tokens.item() == 2
    assert result.logprobs.item() == pytest.approx(expected[2].item())
    assert result.ranks.item() == 2
    assert result.top_ids.tolist() == [[1, 2, 0]]
    assert result.top_logprobs[0].tolist() == pytest.approx(expected[[1, 2, 0]].tolist())


def test_no_alternatives_still_gives_the_chosen_logprob() -> None:
    result = sample(torch.zeros(2, 4), rows(2, temperature=[0.0, 0.0]), Needs(logprobs=0))
    assert result.logprobs is not None
    assert result.logprobs.tolist() == pytest.approx([float(np.log(0.25))] * 2)
    assert result.top_ids is not None
    assert result.top_ids.shape == (2, 0)


@pytest.mark.parametrize("needs", [Needs(), Needs(sampled=True), EVERYTHING])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_are_marked_and_spare_the_others(needs: Needs, bad: float) -> None:
    logits = torch.zeros(4, 9)
    logits[:, 3] = 50.0
    logits[0, 5] = bad
    logits[2] = bad
    assert sample(logits, rows(4), needs).tokens.tolist() == [-1, 3, -1, 3]
    logits[0] = -torch.inf
    assert sample(logits, rows(4), needs).tokens.tolist() == [-1, 3, -1, 3]


def test_bf16_logits_and_no_rows() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert sample(logits, rows(1, temperature=[0.01]), EVERYTHING).tokens.tolist() == [2]
    assert sample(torch.zeros(0, 3), rows(0), Needs()).tokens.tolist() == []


@pytest.mark.parametrize("count", [1, 5, 150])
@pytest.mark.parametrize("hot", [False, True])
def test_changed_logits_are_drawn_from_and_the_models_own_are_scored(count: int, hot: bool) -> None:
    vocab, generator = 40, torch.Generator().manual_seed(count)
    controls = random_controls(count + 1, vocab, generator)
    logits = torch.randn(count, vocab, generator=generator) * 3
    slots = torch.randperm(count, generator=generator)
    params = rows(count, temperature=[0.8 * hot] * count, token_index=torch.arange(count))
    needs = Needs(sampled=hot, adjusted=True, logprobs=2, asked=True)
    doubled = {row: (lambda line: line.mul_(2)) for row in range(0, count, 3)}
    found = sample(logits, params, needs, None, Changes(slots, controls, doubled))
    processed = logits.clone()
    processed[::3] *= 2
    expected = adjust_logits(processed, slots, controls)
    assert found.tokens.tolist() == sample(expected, params, Needs(sampled=hot)).tokens.tolist()
    logprobs = logits.log_softmax(-1)
    assert found.logprobs is not None
    assert found.asked_logprobs is not None
    torch.testing.assert_close(found.logprobs, logprobs.gather(1, found.tokens.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(found.asked_logprobs, logprobs.gather(1, controls.asked[slots].long()))


def test_scores_of_given_tokens() -> None:
    logits = torch.randn(70, 9, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(70) % 9
    found = score(logits, tokens, 4)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found.logprobs, expected.gather(1, tokens.unsqueeze(1)).squeeze(1))
    assert found.top_ids.shape == (70, 4)
    assert found.asked_logprobs is None
    order = expected.argsort(-1, descending=True)
    assert found.ranks.tolist() == [(order[row] == token).nonzero().item() + 1 for row, token in enumerate(tokens)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [3, 8, 4099])
def test_a_row_scores_the_same_bits_wherever_it_stands(device: str, vocab: int) -> None:
    logits = torch.randn(7, vocab, device=device)
    tokens = logits.argmax(-1)
    whole = score(logits, tokens, 2)
    torch.testing.assert_close(whole.logprobs, logits.log_softmax(-1).amax(-1))
    for row in range(7):
        alone = score(logits[row : row + 1].clone(), tokens[row : row + 1], 2)
        assert alone.logprobs.item() == whole.logprobs[row].item()
        assert alone.top_logprobs.tolist() == whole.top_logprobs[row : row + 1].tolist()
