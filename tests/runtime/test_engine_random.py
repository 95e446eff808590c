"""Random requests, aborts and steps: every schedule gives the right tokens and leaks nothing."""

from __future__ import annotations

from history_model import VOCAB, Bench, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.runtime.request import Abort

POISON = VOCAB - 1
tokens = st.integers(0, POISON - 1)


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Requests, aborts and steps in any order. Prompts share beginnings, so that the tree is used."""
    stems = draw(st.lists(st.lists(tokens, min_size=1, max_size=14), min_size=1, max_size=3))
    script: list[tuple[str, object]] = []
    for n in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(tokens, max_size=8))
        script.append(("add", (f"r{n}", prompt, draw(st.integers(1, 18)), draw(st.frozensets(tokens, max_size=2)))))
        script += [("step", None)] * draw(st.integers(0, 5))
        if draw(st.booleans()):
            keep = draw(st.none() | st.integers(0, 6))
            script.append(("abort", (f"r{draw(st.integers(0, n))}", keep)))
    return script


@settings(deadline=None, max_examples=150)
@given(
    script=scripts(),
    num_pages=st.integers(10, 30),
    max_num_seqs=st.integers(1, 4),
    max_step_tokens=st.integers(4, 24),
    overlap=st.booleans(),
    prefix_cache=st.booleans(),
    captured=st.booleans(),
)
def test_any_schedule_gives_right_tokens_and_leaks_nothing(
    script: list[tuple[str, object]],
    num_pages: int,
    max_num_seqs: int,
    max_step_tokens: int,
    overlap: bool,
    prefix_cache: bool,
    captured: bool,
) -> None:
    bench = Bench(
        captured=captured,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        overlap=overlap,
        prefix_cache=prefix_cache,
    )
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for action, argument in script:
        if action == "add":
            name, prompt, count, stops = argument  # type: ignore[misc]
            bench.add(name, prompt, max_tokens=count, eos_ids=tuple(stops))
            expected[name] = answer(prompt, count, tuple(stops))
        elif action == "abort":
            name, keep = argument  # type: ignore[misc]
            if name in bench.engine._sequences:
                aborted.add(name)
            bench.engine.abort(Abort(id=name, keep=keep))
        else:
            bench.step()
    bench.run()
    for name, whole in expected.items():
        found = bench.tokens(name)
        assert found == whole[: len(found)]
        if name not in aborted:
            assert found == whole
            assert bench.reason(name) in ("stop", "length")
    scheduler = bench.engine._scheduler
    assert scheduler.free_slots == max_num_seqs
    scheduler.memory.cache.tree.clear()
    assert scheduler.memory.pages.used == 0
    assert scheduler.memory.pages.num_refs == 0
    bench.close()
