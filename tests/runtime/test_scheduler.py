from __future__ import annotations

import math

import pytest

from treadle.graph.state import LayerKV, PagedKV
from treadle.runtime.plan import Plan
from treadle.runtime.request import Request, SamplingParams, spread
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.arena import Slab
from treadle.runtime.state.pages import PageAllocator

PAGE = 4
KV = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=8, v_dim=8),), dtype="float32", page_tokens=PAGE)


def make(
    num_pages: int,
    *,
    max_num_seqs: int = 4,
    max_step_tokens: int = 16,
    chunk_tokens: int = 16,
    attention_tokens: float = math.inf,
) -> Scheduler:
    allocator = PageAllocator(Slab(offset=KV.page_units, num_units=num_pages * KV.page_units), KV)
    return Scheduler(
        allocator,
        page_tokens=PAGE,
        page_bytes=KV.page_bytes,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        chunk_tokens=chunk_tokens,
        attention_tokens=attention_tokens,
        prefix_cache=True,
    )


def queue(scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 100) -> Sequence:
    request = Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))
    sequence = Sequence(request, order=0, max_tokens=max_tokens, seed=0, arrival_s=0.0)
    scheduler.add(sequence)
    return sequence


def plan(scheduler: Scheduler) -> Plan:
    made = scheduler.schedule()
    assert made is not None
    return made


def collect(scheduler: Scheduler, made: Plan) -> None:
    """Take a step as run: every row gave token 1."""
    for sequence in made.sampled:
        if sequence.finish_reason is None:
            sequence.tokens.append(1)
    scheduler.collected(made)


def shape(made: Plan) -> list[tuple[str, int]]:
    return [(each.id, 1) for each in made.decodes] + [(chunk.sequence.id, chunk.count) for chunk in made.chunks]


def test_a_prompt_that_arrives_beside_answers_is_cut_small() -> None:
    scheduler = make(64, max_step_tokens=16, chunk_tokens=3)
    queue(scheduler, "a", [0] * 14)
    first = plan(scheduler)
    assert shape(first) == [("a", 14)]
    collect(scheduler, first)
    queue(scheduler, "b", [1] * 8)
    for expected in ([("a", 1), ("b", 2)],) * 4:
        made = plan(scheduler)
        assert shape(made) == expected
        collect(scheduler, made)


def test_a_prompt_gets_half_of_a_small_step_however_many_are_answered() -> None:
    scheduler = make(64, max_step_tokens=16, chunk_tokens=4, max_num_seqs=8)
    for index in range(6):
        queue(scheduler, f"a{index}", [index] * 2)
    collect(scheduler, plan(scheduler))
    queue(scheduler, "b", [9] * 8)
    assert shape(plan(scheduler))[-1] == ("b", 2)


def test_prompts_that_outnumber_answers_get_whole_steps() -> None:
    scheduler = make(64, max_step_tokens=16, chunk_tokens=3)
    queue(scheduler, "a", [0] * 2)
    collect(scheduler, plan(scheduler))
    queue(scheduler, "b", [1] * 9)
    queue(scheduler, "c", [2] * 9)
    made = plan(scheduler)
    assert shape(made) == [("a", 1), ("b", 9), ("c", 6)]
    collect(scheduler, made)
    # Now there is a single prompt left beside two answers.
    assert shape(plan(scheduler)) == [("a", 1), ("b", 1), ("c", 1)]


def test_later_chunks_of_a_long_prompt_are_smaller() -> None:
    scheduler = make(64, max_step_tokens=16, chunk_tokens=13, attention_tokens=12.0)
    queue(scheduler, "a", [0] * 2)
    collect(scheduler, plan(scheduler))
    queue(scheduler, "b", [1] * 40)
    counts = []
    for _ in range(5):
        made = plan(scheduler)
        counts.append(made.chunks[0].count)
        collect(scheduler, made)
    # Behind 12 tokens one costs twice as much, behind 18 two and a half times ...
    assert counts == [12, 6, 4, 4, 3]


def test_prompts_are_cut_to_what_decodes_leave_of_a_step() -> None:
    scheduler = make(64, max_step_tokens=8)
    queue(scheduler, "a", [0] * 3)
    queue(scheduler, "b", [1] * 20)
    queue(scheduler, "c", [2] * 2)
    shapes = []
    for _ in range(5):
        made = plan(scheduler)
        shapes.append(shape(made))
        collect(scheduler, made)
    assert shapes == [
        [("a", 3), ("b", 5)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 1), ("c", 2)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]


def test_a_step_is_planned_before_the_last_one_is_known() -> None:
    scheduler = make(64)
    queue(scheduler, "a", [0] * 3, max_tokens=3)
    plans = [plan(scheduler), plan(scheduler), plan(scheduler)]
    assert [shape(made) for made in plans] == [[("a", 3)], [("a", 1)], [("a", 1)]]
    # Three tokens are on their way; there is no fourth.
    assert scheduler.schedule() is None


def test_slots_bound_what_runs_and_the_first_come_is_first_served() -> None:
    scheduler = make(64, max_num_seqs=2)
    for name in "abc":
        queue(scheduler, name, [ord(name)])
    made = plan(scheduler)
    assert shape(made) == [("a", 1), ("b", 1)]
    scheduler.finish(scheduler.running[0], "stop")
    # Its slot is in use until the step is collected.
    assert shape(plan(scheduler)) == [("b", 1)]
    assert scheduler.free_slots == 0
    collect(scheduler, made)
    assert scheduler.free_slots == 1
    assert shape(plan(scheduler))[-1] == ("c", 1)


def test_a_prompt_waits_for_pages_and_nobody_overtakes_it() -> None:
    scheduler = make(8)
    first = queue(scheduler, "first", [0] * 16)
    queue(scheduler, "big", [1] * 16)
    queue(scheduler, "small", [2] * 2)
    collect(scheduler, plan(scheduler))
    made = plan(scheduler)
    assert shape(made) == [("first", 1)]
    collect(scheduler, made)
    scheduler.finish(first, "stop")
    assert shape(plan(scheduler)) == [("big", 16)]


def test_the_youngest_makes_room_once_its_step_is_collected() -> None:
    scheduler = make(6, max_num_seqs=2)
    old, young = queue(scheduler, "old", [0] * 8), queue(scheduler, "young", [1] * 7)
    collect(scheduler, plan(scheduler))
    for _ in range(3):
        collect(scheduler, plan(scheduler))
    assert scheduler.allocator.free == 0
    # old fills its third page while young, in flight, still uses its own.
    pending = plan(scheduler)
    assert shape(pending) == [("old", 1), ("young", 1)]
    assert scheduler.schedule() is None
    assert young.leaving
    collect(scheduler, pending)
    assert (young.slot, young.pages, young.preemptions) == (None, [], 1)
    assert list(scheduler.waiting) == [young]
    assert shape(plan(scheduler)) == [("old", 1)]
    assert old.slot is not None


def test_a_preempted_request_comes_back_to_its_own_pages() -> None:
    scheduler = make(6, max_num_seqs=2)
    old, young = queue(scheduler, "old", [0] * 7), queue(scheduler, "young", [1] * 8)
    while young.preemptions == 0:
        if made := scheduler.schedule():
            collect(scheduler, made)
    for _ in range(3):
        # There is room for it, but not to grow: it waits.
        made = plan(scheduler)
        assert shape(made) == [("old", 1)]
        collect(scheduler, made)
    scheduler.finish(old, "length")
    made = plan(scheduler)
    chunk = made.chunks[0]
    assert chunk.sequence is young
    assert chunk.start > 0
    assert chunk.start + chunk.count == len(young.tokens)


@pytest.mark.parametrize(
    ("num_pages", "preemptions", "max_tokens", "admitted"),
    [
        # 3 pages are the first one's and 2 would do for the second; each wants one more.
        (6, 0, 100, False),
        (7, 0, 100, True),
        # One that was pushed out before waits until both can grow by 8 pages, or as far as they ever will.
        (7, 1, 100, False),
        (20, 1, 100, False),
        (21, 1, 100, True),
        (7, 1, 4, True),
    ],
)
def test_a_newcomer_must_leave_room_to_grow(num_pages: int, preemptions: int, max_tokens: int, admitted: bool) -> None:
    scheduler = make(num_pages, max_step_tokens=32)
    queue(scheduler, "first", [0] * 12, max_tokens)
    queue(scheduler, "second", [1] * 8, max_tokens).preemptions = preemptions
    assert (("second", 8) in shape(plan(scheduler))) == admitted


def test_heal_names_owners_and_leaves_the_tree_usable() -> None:
    scheduler = make(8)
    first = queue(scheduler, "first", [0] * 9)
    collect(scheduler, plan(scheduler))
    scheduler.finish(first, "stop")
    assert scheduler.heal() == {}
    scheduler.allocator.take(2, "ghost")
    _, node = scheduler.tree.match(first.tokens)
    scheduler.tree.lock(node)
    assert scheduler.heal() == {"ghost": 2, "first": 2}
    assert scheduler.pages_held == 0
    queue(scheduler, "second", [0] * 9)
    assert plan(scheduler).chunks[0].start == 8


def test_answers_of_one_prompt_wait_for_it_and_part_at_its_end() -> None:
    scheduler = make(64, max_num_seqs=3, max_step_tokens=8)
    params = SamplingParams(n=4, max_tokens=20)
    group = []
    for request in spread(Request(id="g", prompt=list(range(10)), params=params)):
        group.append(Sequence(request, order=0, max_tokens=20, seed=0, arrival_s=0.0))
        scheduler.add(group[-1])
    first, second, third, late = group
    made = plan(scheduler)
    assert shape(made) == [("g-0", 8)]
    assert (made.forks, made.after, scheduler.free_slots) == ([], [], 2)
    collect(scheduler, made)
    made = plan(scheduler)
    assert shape(made) == [("g-0", 2)]
    assert made.forks == [second, third]
    assert made.sampled == [first, second, third]
    assert made.after == [(first.pages[2], each.pages[2], KV.page_bytes) for each in (second, third)]
    assert [each.pages[:2] for each in (second, third)] == [first.pages[:2]] * 2
    assert len({each.pages[2] for each in (first, second, third)}) == 3
    collect(scheduler, made)
    scheduler.finish(second, "abort")
    # Who found no slot then computes what no full page holds.
    made = plan(scheduler)
    assert shape(made) == [("g-0", 1), ("g-2", 1), ("g-3", 2)]
    assert (made.chunks[0].start, late.pages[:2]) == (8, first.pages[:2])
    collect(scheduler, made)
    for each in (first, third, late):
        scheduler.finish(each, "stop")
    assert scheduler.heal() == {}
