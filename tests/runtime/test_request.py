"""What is made of a request that asks for several answers."""

from __future__ import annotations

import pytest

from treadle.runtime.request import Request, SamplingParams, spread


def test_one_answer_is_the_request_itself() -> None:
    request = Request(id="r", prompt=[1, 2], params=SamplingParams())
    assert spread(request) == [request]


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(None, [None] * 3), (5, [5, 6, 7]), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)])],
)
def test_answers_are_one_group_with_seeds_of_their_own(seed: int | None, seeds: list[int | None]) -> None:
    params = SamplingParams(n=3, seed=seed, prompt_logprobs=2, top_k=4)
    requests = spread(Request(id="r", prompt=[1, 2], params=params, eos_ids=(9,), arrival_s=1.5))
    assert [each.id for each in requests] == ["r-0", "r-1", "r-2"]
    assert [each.choice for each in requests] == [0, 1, 2]
    assert {each.group for each in requests} == {"r"}
    assert [each.params.seed for each in requests] == seeds
    assert [each.params.prompt_logprobs for each in requests] == [2, None, None]
    assert all((each.params.n, each.params.top_k, each.eos_ids) == (1, 4, (9,)) for each in requests)
    assert all(each.prompt == [1, 2] for each in requests)
