"""What is made of a request that asks for several answers, and which hints there may be."""

from __future__ import annotations

import pytest

from treadle.runtime.request import Request, RequestError, SamplingParams, SessionHint, spread


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


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"id": ""}, "id", "id='' is not a text of 1 to 512 characters"),
        ({"id": "x" * 513}, "id", "1 to 512"),
        ({"id": 7}, "id", "id=7 is not a text"),
        ({"pin_s": -1}, "pin_s", r"pin_s=-1 is not a number in \[0, 3600\]"),
        ({"pin_s": float("nan")}, "pin_s", "pin_s=nan"),
        ({"pin_s": "30"}, "pin_s", "pin_s='30' is not a number"),
        ({"pin_s": True}, "pin_s", "pin_s=True is not a number"),
        ({"demote": 1}, "demote", "demote=1 is not True or False"),
        ({"prefetch": "no"}, "prefetch", "prefetch='no' is not True or False"),
        ({"pin_s": 1, "demote": True}, "demote", "demote gives up what pin_s asks for; leave one out"),
        ({"prefetch": True, "demote": True}, "demote", "demote gives up what prefetch asks for"),
    ],
)
def test_hints_that_are_none_or_opposites_are_refused_at_construction(given, field, message) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SessionHint(**{"id": "s", **given})
    assert caught.value.field == field


def test_hints_that_go_together_are_taken() -> None:
    SessionHint(id="s", pin_s=3600, prefetch=True)
    SessionHint(id="s" * 512, demote=True)
