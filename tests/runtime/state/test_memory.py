from __future__ import annotations

from arenas import make_arena
from history_model import HYBRID, PAGE_TOKENS, RECURRENT, WINDOWED

from treadle.graph.state import State
from treadle.runtime.plan import Plan
from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.checkpoints import CheckpointPolicy
from treadle.runtime.state.memory import StateMemory, arena_kinds

POLICY = CheckpointPolicy(page_tokens=PAGE_TOKENS, least_tokens=PAGE_TOKENS)


class Loop:
    """A scheduler over the memory of a model, and requests whose every token is 1."""

    def __init__(self, state: State, num_pages: int = 32, others: int = 12) -> None:
        arena = make_arena(state, {0: num_pages, **dict.fromkeys(range(1, 5), others)})
        self.memory = StateMemory(arena, state, max_step_tokens=16, policy=POLICY)
        self.scheduler = Scheduler(self.memory, max_num_seqs=4, max_step_tokens=16, chunk_tokens=16)

    def add(self, name: str, prompt: list[int], max_tokens: int = 50) -> Sequence:
        request = Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))
        sequence = Sequence(request, order=0, max_tokens=max_tokens, seed=0, arrival_s=0.0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan is not None
        for sequence in plan.sampled:
            sequence.tokens.append(1)
        self.scheduler.collected(plan)
        return plan


def test_kinds_are_the_groups_and_then_the_block() -> None:
    assert [kind.item_bytes for kind in arena_kinds(HYBRID)] == [256, 512, 256, 1280]
    assert len(arena_kinds(WINDOWED)) == 2


def test_a_prompt_is_cut_where_a_checkpoint_is_copied() -> None:
    loop = Loop(RECURRENT)
    sequence = loop.add("a", list(range(11)))
    first = loop.step()
    assert [(chunk.start, chunk.count) for chunk in first.chunks] == [(0, 8)]
    offset = loop.memory.arena.pool(1).offset
    (snapshot,) = loop.memory.cache.snapshots
    assert sequence.block is not None
    assert sequence.block_offset == offset(sequence.block)
    block = RECURRENT.block
    assert block is not None
    assert first.after == [(offset(sequence.block), offset(snapshot.items[1][0]), block.block_bytes)]
    assert (first.before, snapshot.position) == ([], 8)
    assert [(chunk.start, chunk.count) for chunk in loop.step().chunks] == [(8, 3)]


def test_who_hits_a_checkpoint_begins_with_a_copy_and_its_own_begin_of_windows() -> None:
    loop = Loop(HYBRID)
    loop.add("a", list(range(22)))
    loop.step(), loop.step()
    made = next(each for each in loop.memory.cache.snapshots if each.position == 20)
    late = loop.add("b", [*range(20), 9, 9, 9])
    plan = loop.step()
    assert (plan.chunks[0].start, late.num_cached) == (20, 20)
    block_kind = len(HYBRID.groups)
    pool = loop.memory.arena.pool(block_kind)
    assert late.block is not None
    assert plan.before == [(pool.offset(made.items[block_kind][0]), pool.offset(late.block), pool.item_bytes)]
    # A window of 9 sees token 12 and those behind it, a chunk of 8 begins at 16.
    assert [window.first for window in late.windows] == [3, 4]
    assert tuple(late.windows[0].pages[:2]) == made.items[1]
    row, first, run = plan.tables[-1]
    assert (row, first, len(run)) == (1, 0, 3)
    assert [len(pages) for pages in run] == [6, 6, 6]
    assert run[1][:3] == [0, 0, 0]
    assert run[1][3:] == loop.memory.arena.pool(1).offsets(late.windows[0].pages)


def test_windows_give_pages_back_as_they_move_on() -> None:
    loop = Loop(WINDOWED)
    sequence = loop.add("a", list(range(5)))
    for _ in range(40):
        loop.step()
    (window,) = sequence.windows
    assert len(sequence.pages) == window.end == 11
    assert len(window.pages) <= 3
    loop.scheduler.finish(sequence, "length")
    assert loop.memory.pages_held == 0
    assert loop.scheduler.heal() == {}


def test_a_finished_sequence_leaves_its_block_without_a_copy() -> None:
    loop = Loop(RECURRENT)
    sequence = loop.add("a", list(range(5)), max_tokens=3)
    for _ in range(4):
        plan = loop.step()
    block = sequence.block
    loop.scheduler.finish(sequence, "length")
    tail = next(each for each in loop.memory.cache.snapshots if each.position == 7)
    assert tail.items[1] == (block,)
    assert (plan.after, sequence.block, sequence.pages) == ([], None, [])
    # Cut by somebody else, behind the last token that counts: nothing is left of the block.
    cut = loop.add("b", [9] * 5)
    for _ in range(4):
        loop.step()
    del cut.tokens[6:]
    cut.cut = True
    loop.scheduler.finish(cut, "stop")
    assert {each.position for each in loop.memory.cache.snapshots} == {4, 7}


def test_what_somebody_forgot_is_found_in_every_pool() -> None:
    loop = Loop(HYBRID)
    sequence = loop.add("a", list(range(9)))
    loop.step(), loop.step()
    loop.scheduler.finish(sequence, "stop")
    for pool in loop.memory.arena.pools:
        pool.take(1, "ghost")
    assert loop.scheduler.heal() == {"ghost": len(loop.memory.arena.pools)}
    assert loop.scheduler.heal() == {}
