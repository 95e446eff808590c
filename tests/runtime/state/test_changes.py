from __future__ import annotations

from arenas import make_arena
from history_model import HYBRID

from treadle.runtime.plan import Chunk, Plan
from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sequence import Sequence, Window
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.changes import Changes


def sequence_in(arena: Arena, num_pages: int, windows: tuple[tuple[int, int], ...], slot: int) -> Sequence:
    """A sequence with so many pages, and of each window pages from ``first`` on, so many."""
    request = Request(id=f"s{slot}", prompt=[1] * 4 * num_pages, params=SamplingParams())
    sequence = Sequence(request, order=0, max_tokens=9, seed=0, arrival_s=0.0)
    sequence.slot = slot
    sequence.pages = arena.pool(0).take(num_pages, sequence.id)
    sequence.windows = [
        Window(first, arena.pool(kind).take(count, sequence.id)) for kind, (first, count) in enumerate(windows, 1)
    ]
    (sequence.block,) = arena.pool(3).take(1, sequence.id)
    return sequence


def test_a_run_has_equally_many_of_every_group() -> None:
    arena = make_arena(HYBRID, dict.fromkeys(range(4), 12))
    changes = Changes(arena, HYBRID)
    sequence = sequence_in(arena, 5, ((1, 3), (4, 1)), slot=0)
    plan = Plan(decodes=[sequence])
    changes.touch(sequence, 0, 4, 5)
    changes.touch(sequence, 0, 2, 3)
    changes.settle(plan, [sequence])
    pages, first, second = sequence.pages, sequence.windows[0].pages, sequence.windows[1].pages
    pools = arena.pools
    assert plan.tables == [
        (0, 2, [pools[0].offsets(pages[2:5]), [*pools[1].offsets(first[1:3]), 0], [0, 0, pools[2].offset(second[0])]])
    ]
    again = Plan(decodes=[sequence])
    changes.settle(again, [sequence])
    assert (again.tables, again.before, again.blocks) == ([], [], [])


def test_who_was_moved_learns_where_to_even_if_it_is_not_in_the_step() -> None:
    arena = make_arena(HYBRID, dict.fromkeys(range(4), 12))
    changes = Changes(arena, HYBRID)
    staying, waiting = (sequence_in(arena, 3, ((0, 2), (0, 2)), slot) for slot in range(2))
    # As after a move of all that they hold.
    arena.moved += [(0, waiting.pages[1]), (3, waiting.block or 0), (1, staying.windows[0].pages[0])]
    plan = Plan(decodes=[staying])
    changes.copy_before(3, waiting.block or 0, staying.block or 0)
    changes.settle(plan, [staying, waiting])
    assert [(row, first, len(run[0])) for row, first, run in plan.tables] == [(0, 0, 3)]
    assert plan.blocks == [(1, arena.pool(3).offset(waiting.block or 0))]
    assert len(plan.before) == 1
    later = Plan(decodes=[staying], chunks=[Chunk(sequence=waiting, start=0, count=1, samples=False)])
    changes.settle(later, [staying, waiting])
    assert [(row, first, len(run[0])) for row, first, run in later.tables] == [(1, 0, 3)]
    # One that gives everything back is not written to again.
    changes.touch(staying, 0, 0, 1)
    changes.forget(staying)
    last = Plan(decodes=[staying])
    changes.settle(last, [staying])
    assert last.tables == []
