"""Models whose state is more than pages of all tokens: windows, and blocks that only know where they are."""

from __future__ import annotations

import pytest
from history_model import HYBRID, PAGE_TOKENS, RECURRENT, STATES, VOCAB, WINDOWED, Bench, answer, choices
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.runtime.request import Abort

KINDS = [name for name in STATES if name != "full"]
tokens = st.integers(0, VOCAB - 1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_requests_together_answer_as_alone(name: str, overlap: bool, captured: bool) -> None:
    prompts = {f"r{n}": [(n * 5 + i * i) % VOCAB for i in range(1 + 5 * n)] for n in range(9)}
    bench = Bench(state=STATES[name], overlap=overlap, captured=captured)
    for request, prompt in prompts.items():
        bench.add(request, prompt, max_tokens=5 + len(prompt) % 4)
    bench.run()
    for request, prompt in prompts.items():
        assert bench.tokens(request) == answer(prompt, 5 + len(prompt) % 4)
    bench.close()


def test_a_conversation_goes_on_from_the_end_of_the_answer() -> None:
    prompt = list(range(11))
    bench = Bench(state=HYBRID)
    bench.add("first", prompt, max_tokens=8)
    bench.run()
    longer = prompt + bench.tokens("first") + [5, 6]
    before = sum(bench.model.step_tokens)
    bench.add("second", longer, max_tokens=1)
    bench.run()
    assert bench.tokens("second") == answer(longer, 1)
    # 18 of 19 tokens were computed, in the middle of a page.
    assert bench.outputs["second"][0].num_cached_tokens == 18
    assert sum(bench.model.step_tokens) - before == 3
    bench.close()


def test_the_same_prompt_and_a_longer_one_hit_the_second_time() -> None:
    """Hits are as fine as pages, whatever the state: 700 tokens, then the same and 50 more."""
    prompt = [(i * i + 3) % VOCAB for i in range(700)]
    bench = Bench(state=HYBRID, num_pages=500, max_len=1024, max_step_tokens=512, checkpoint_tokens=64)
    for name, tokens in (("cold", prompt), ("again", prompt), ("longer", [*prompt, *range(20), *range(20), *[1] * 10])):
        bench.add(name, tokens, max_tokens=2)
        bench.run()
        assert bench.tokens(name) == answer(tokens, 2)
    cached = [bench.outputs[name][0].num_cached_tokens for name in ("cold", "again", "longer")]
    assert cached == [0, 696, 696]
    bench.close()


@pytest.mark.parametrize("name", KINDS)
def test_answers_of_one_prompt_part_at_its_end(name: str) -> None:
    for length in (8, 11):
        bench = Bench(state=STATES[name])
        names = choices(bench, "g", [7] * length, 4, temperature=0.0)
        bench.run()
        for each in names:
            assert bench.tokens(each) == answer([7] * length, 9)
        assert sum(bench.model.step_tokens) == length + 4 * 8
        bench.close()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_changes_no_token_and_everyone_finishes(name: str, overlap: bool, prefix_cache: bool) -> None:
    prompts = {f"r{n}": [(n * 7 + i) % VOCAB for i in range(8)] for n in range(8)}
    bench = Bench(state=STATES[name], num_pages=13, overlap=overlap, prefix_cache=prefix_cache)
    for request, prompt in prompts.items():
        bench.add(request, prompt, max_tokens=24)
    bench.run()
    for request, prompt in prompts.items():
        assert bench.tokens(request) == answer(prompt, 24)
    bench.close()


def test_a_host_found_stop_drops_a_block_that_is_ahead() -> None:
    prompt = [1, 2, 3, 4, 5]
    bench = Bench(state=RECURRENT)
    bench.add("a", prompt, max_tokens=40)
    while len(bench.outputs.get("a", [])) < 20:
        bench.step()
    bench.engine.abort(Abort(id="a", keep=9))
    bench.run()
    longer = prompt + answer(prompt, 9) + [1]
    bench.add("b", longer, max_tokens=4)
    bench.run()
    # What is left is the checkpoint in the prompt.
    assert bench.outputs["b"][0].num_cached_tokens == PAGE_TOKENS
    assert bench.tokens("b") == answer(longer, 4)
    bench.close()


def test_a_branch_gets_a_checkpoint_once_it_was_seen() -> None:
    stem = [(i * 7) % VOCAB for i in range(30)]
    bench = Bench(state=HYBRID)
    for n, name in enumerate("abc"):
        bench.add(name, stem + [n] * 9, max_tokens=2)
        bench.run()
        assert bench.tokens(name) == answer(stem + [n] * 9, 2)
    cached = [bench.outputs[name][0].num_cached_tokens for name in "abc"]
    assert cached == [0, 0, 28]
    bench.close()


def test_prompts_with_one_beginning_wait_a_step_for_it() -> None:
    stem = [(i * 7) % VOCAB for i in range(14)]
    bench = Bench(state=HYBRID, max_step_tokens=32)
    for n, name in enumerate("abcd"):
        bench.add(name, [*stem, n, n + 1], max_tokens=2)
    bench.run()
    for n, name in enumerate("abcd"):
        assert bench.tokens(name) == answer([*stem, n, n + 1], 2)
    assert sum(bench.model.step_tokens) == 16 + 3 * 4 + 4
    bench.close()


def test_pages_behind_a_window_are_given_back() -> None:
    bench = Bench(state=WINDOWED, num_pages=64, others=9, max_len=256)
    bench.add("a", [3] * 50, max_tokens=150)
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, bench.arena.pool(1).used)
    assert bench.tokens("a") == answer([3] * 50, 150)
    # A chunk of 16 tokens and the window of 6 before it; checkpoints keep a few more.
    assert most <= 14
    bench.close()


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Requests, follow-ups, aborts and steps in any order. Prompts share beginnings, so that the tree is used."""
    stems = draw(st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=1, max_size=3))
    script: list[tuple[str, object]] = []
    for n in range(draw(st.integers(1, 10))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(tokens, max_size=8))
        follows = draw(st.none() | st.integers(0, n))
        stops = draw(st.frozensets(tokens, max_size=2))
        script.append(("add", (f"r{n}", prompt, follows, draw(st.integers(1, 34)), stops, draw(st.integers(0, 2)))))
        script += [("step", None)] * draw(st.integers(0, 6))
        if draw(st.integers(0, 3)) == 0:
            keep = draw(st.none() | st.integers(0, 6))
            script.append(("abort", (f"r{draw(st.integers(0, n))}", keep)))
    return script


@settings(deadline=None, max_examples=100)
@given(
    script=scripts(),
    name=st.sampled_from(sorted(STATES)),
    num_pages=st.integers(12, 28),
    others=st.integers(3, 9),
    max_num_seqs=st.integers(1, 5),
    max_step_tokens=st.integers(5, 24),
    overlap=st.booleans(),
    prefix_cache=st.booleans(),
    captured=st.booleans(),
    checkpoint_bytes=st.none() | st.integers(0, 8192),
    host_bytes=st.just(0) | st.integers(8192, 1 << 17),
)
def test_any_schedule_gives_right_tokens_and_leaks_nothing(
    script: list[tuple[str, object]],
    name: str,
    num_pages: int,
    others: int,
    max_num_seqs: int,
    max_step_tokens: int,
    overlap: bool,
    prefix_cache: bool,
    captured: bool,
    checkpoint_bytes: int | None,
    host_bytes: int,
) -> None:
    bench = Bench(
        state=STATES[name],
        captured=captured,
        num_pages=num_pages,
        others=others,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        overlap=overlap,
        prefix_cache=prefix_cache,
        checkpoint_bytes=checkpoint_bytes,
        host_bytes=host_bytes,
    )
    longest = bench.engine._max_tokens
    expected: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for action, argument in script:
        if action == "add":
            request, prompt, follows, count, stops, salt = argument  # type: ignore[misc]
            if follows is not None and f"r{follows}" in bench.outputs:
                prompt = prompts[f"r{follows}"] + bench.tokens(f"r{follows}") + prompt
            count = min(count, longest - 2)
            prompt = prompt[: longest - count - 1]
            bench.add(request, prompt, max_tokens=count, eos_ids=tuple(stops), salt=str(salt) if salt else None)
            prompts[request], expected[request] = prompt, answer(prompt, count, tuple(stops))
        elif action == "abort":
            request, keep = argument  # type: ignore[misc]
            if request in bench.engine._sequences:
                aborted.add(request)
            bench.engine.abort(Abort(id=request, keep=keep))
        else:
            bench.step()
    bench.run()
    for request, whole in expected.items():
        found = bench.tokens(request)
        assert found == whole[: len(found)]
        if request not in aborted:
            assert found == whole
            assert bench.reason(request) in ("stop", "length")
    scheduler = bench.engine._scheduler
    assert scheduler.free_slots == max_num_seqs
    assert scheduler.heal() == {}
    scheduler.memory.cache.tree.clear()
    assert [(pool.used, pool.num_refs) for pool in bench.arena.pools] == [(0, 0)] * len(bench.arena.pools)
    bench.close()
