from __future__ import annotations

import pytest
from arenas import make_arena
from history_model import HYBRID, RECURRENT, STATE, WINDOWED

from treadle.graph.state import State
from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.memory import StateMemory
from treadle.runtime.state.room import CALM_PAGES, Others


def memory_of(state: State, **counts: int) -> StateMemory:
    arena = make_arena(state, {int(kind[1:]): count for kind, count in counts.items()})
    return StateMemory(arena, state, max_step_tokens=16)


@pytest.mark.parametrize(
    ("num_tokens", "chunks", "pages"), [(4, True, 1), (100, False, 3), (100, True, 7), (9, True, 3)]
)
def test_a_window_and_a_step_bound_the_pages_of_a_group(num_tokens: int, chunks: bool, pages: int) -> None:
    room = memory_of(WINDOWED, k0=16, k1=16).cache.room
    # A window of 6 tokens, steps of 16, pages of 4.
    assert room.span(1, num_tokens, chunks) == pages


@pytest.mark.parametrize("state", [HYBRID, RECURRENT, WINDOWED])
def test_the_longest_sequence_has_room_for_all_its_states(state: State) -> None:
    memory = memory_of(state, k0=30, k1=12, k2=12, k3=2)
    longest = memory.longest(10_000)
    room = memory.cache.room

    def fits(tokens: int) -> bool:
        need = {0: room.pages_for(tokens)} | {g: room.span(g, tokens, True) for g in range(1, len(state.groups))}
        return room.fits(need if state.block is None else need | {len(state.groups): 1})

    assert longest >= 120
    assert fits(longest)
    assert not fits(longest + 4)
    assert memory.longest(7) == 7


def test_room_is_made_of_what_is_kept() -> None:
    memory = memory_of(RECURRENT, k0=8, k1=2)
    room, snapshots = memory.cache.room, memory.cache.snapshots
    assert room.make({1: 2})
    assert not room.fits({0: 10_000})
    assert not room.make({0: 10_000})
    assert len(snapshots) == 0


def sequence(num_tokens: int, preemptions: int = 0) -> Sequence:
    request = Request(id="r", prompt=[1] * num_tokens, params=SamplingParams())
    made = Sequence(request, order=0, max_tokens=40, seed=0, arrival_s=0.0)
    made.preemptions = preemptions
    return made


def test_room_stays_for_those_that_a_newcomer_passes() -> None:
    room = memory_of(STATE, k0=64).cache.room
    newcomer, ahead = sequence(3), sequence(21)
    # A page each to grow, and all of the other one's.
    assert room.beside(newcomer, Others((), (ahead,))) == {0: 2 + 6}
    ahead.wait.coming = {0: 5}
    assert room.beside(newcomer, Others((), (ahead,))) == {0: 2 + 1}
    # Who comes back looks for more room, and must still find it.
    assert room.beside(newcomer, Others((), (sequence(21, preemptions=1),))) == {0: 2 * CALM_PAGES + 6}
