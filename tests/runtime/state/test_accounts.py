from __future__ import annotations

import pytest
from arenas import make_arena
from history_model import STATE

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.accounts import Accounts
from treadle.runtime.state.memory import StateMemory


@pytest.fixture
def accounts() -> Accounts:
    arena = make_arena(STATE, {0: 8}, CpuBackend(threads=1))
    return Accounts(StateMemory(arena, STATE, max_step_tokens=8).cache.misses)


def sequence(restored: dict[str, int], *, left: int = 0, failed: int = 0, preemptions: int = 0) -> Sequence:
    request = Request(id="r", prompt=[1] * 20, params=SamplingParams())
    made = Sequence(request, order=0, max_tokens=4, seed=0, arrival_s=0.0)
    made.left, made.preemptions = left, preemptions
    made.wait.restored, made.wait.failed = restored, failed
    return made


def test_a_new_prompt_counts_by_place_and_reason(accounts: Accounts) -> None:
    new = sequence({"host": 8, "disk": 6})
    accounts.admitted(new, 12, {"cold": 8, "evicted": 0}, has_tiers=True)
    # Of what a tier brought, the last tokens were not used.
    assert new.cached_tokens == {"host": 8, "disk": 4}
    assert new.missed_tokens == {"cold": 8}
    accounts.admitted(sequence({"host": 4}), 12, {"cold": 8}, has_tiers=True)
    accounts.admitted(sequence({}), 12, {"cold": 8}, has_tiers=False)
    assert (accounts.external_queries, accounts.external_hits) == (20 + 12, 12 + 4)
    assert accounts.misses.tokens["cold"] == 24


@pytest.mark.parametrize(
    ("restored", "failed", "position", "state", "recomputed"),
    [
        ({}, 0, 12, "kept", {"evicted": 0, "failed": 0}),
        ({"host": 8}, 0, 12, "moved", {"evicted": 0, "failed": 0}),
        ({}, 0, 4, "recomputed", {"evicted": 8, "failed": 0}),
        ({"host": 4}, 8, 4, "recomputed", {"evicted": 0, "failed": 8}),
    ],
)
def test_a_preempted_one_counts_by_what_became_of_its_state(
    accounts: Accounts, restored: dict[str, int], failed: int, position: int, state: str, recomputed: dict[str, int]
) -> None:
    back = sequence(restored, left=12, failed=failed, preemptions=1)
    accounts.admitted(back, position, {}, has_tiers=True)
    assert {name: count for name, count in accounts.preempted.items() if count} == {state: 1}
    assert accounts.recomputed == recomputed
    assert back.cached_tokens == {}
