"""State that leaves the device and comes back: nothing is computed twice while there is room anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from history_model import PAGE_TOKENS, STATES, VOCAB, Bench, answer
from tiers_engine import DictStore

from treadle.runtime.request import SessionHint
from treadle.runtime.state.tiers.ticket import Where
from treadle.runtime.state.tiers.tiers import Link


@pytest.mark.parametrize(("overlap", "prefix_cache"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("name", sorted(STATES))
def test_requests_that_do_not_fit_together_are_computed_once(name: str, overlap: bool, prefix_cache: bool) -> None:
    """Memory for 2.2 sequences, eight of which want to run."""
    prompts = {f"r{n}": [(n * 7 + i * i) % VOCAB for i in range(40)] for n in range(8)}
    num_pages, others = (20, 4) if name == "hybrid" else (44, 9)
    bench = Bench(
        state=STATES[name], num_pages=num_pages, others=others, overlap=overlap, max_num_seqs=8, host_bytes=1 << 20,
        max_len=84, prefix_cache=prefix_cache,
    )  # fmt: skip
    for request, prompt in prompts.items():
        bench.add(request, prompt, max_tokens=40)
    last, idle = 0, 0
    while bench.engine.has_work:
        bench.step()
        given = sum(len(output.token_ids) for outputs in bench.outputs.values() for output in outputs)
        idle = 0 if given > last else idle + 1
        last = given
        assert idle < 200
    for request, prompt in prompts.items():
        assert bench.tokens(request) == answer(prompt, 40)
    stats = bench.engine.stats()
    assert stats.preemptions > 0 or name == "hybrid"
    # A prompt token once, an answer's token once but for the last.
    assert sum(bench.model.step_tokens) == 8 * (40 + 39)
    bench.close()


def test_sessions_that_do_not_fit_the_device_are_not_computed_again() -> None:
    """Turns of sessions of which the device holds a few: under 1 % of prompt tokens are computed twice."""
    turns, sessions, answers = 6, 16, 3
    bench = Bench(
        state=STATES["hybrid"], num_pages=160, others=24, max_num_seqs=4, max_step_tokens=64, host_bytes=8 << 20,
        max_len=256,
    )  # fmt: skip
    history = {n: [(n + i * i) % VOCAB for i in range(10)] + [n % VOCAB] * 3 for n in range(sessions)}
    fresh = prompts = 0
    for turn in range(turns):
        for n in range(sessions):
            added = [(n * 5 + turn * 3 + i) % VOCAB for i in range(6)]
            history[n] = history[n] + added
            name = f"{n}/{turn}"
            prompts += len(history[n])
            # The last token of an answer is not computed before its session returns.
            fresh += len(added) + answers - 1 + (13 if turn == 0 else 1)
            bench.add(name, history[n], max_tokens=answers)
        bench.run()
        for n in range(sessions):
            name = f"{n}/{turn}"
            assert bench.tokens(name) == answer(history[n], answers)
            history[n] += bench.tokens(name)
    computed = sum(bench.model.step_tokens)
    assert computed - fresh < prompts / 100
    bench.close()


def test_an_engine_that_is_asked_nothing_tells_what_its_stores_do_and_that_pins_end() -> None:
    store = DictStore(instant=True)
    store.gates = {"open": threading.Event(), "save": threading.Event()}
    link = Link(name="disk", store=store, where=Where.DISK, limit_s=20)
    bench = Bench(state=STATES["hybrid"], host_bytes=1 << 20, links=[link])

    def number(name: str) -> float:
        return next(each.value for each in bench.engine.stats().tiers if each.name == f"kv_offload_tiering_{name}")

    def until(reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < end
            time.sleep(0.002)

    assert number("up") == 0
    store.gates["open"].set()
    until(lambda: number("up") == 1)
    bench.add("a", [i % VOCAB for i in range(40)], max_tokens=3, session=SessionHint(id="s", pin_s=1.0))
    bench.run()
    assert (number("write_bytes"), bench.engine.stats().sessions_pinned) == (0, 1)
    store.gates["save"].set()
    until(lambda: 0 < number("write_bytes") == sum(map(len, store.kept.values())))
    until(lambda: bench.engine.stats().sessions_pinned == 0)
    bench.close()


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_prompt_is_kept_outside_as_soon_as_it_is_computed(name: str) -> None:
    """Not only once its answer has ended: others may begin with it, and the process may end first."""
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    bench.add("a", [(i * 5 + 1) % VOCAB for i in range(21)], max_tokens=30)
    while len(bench.outputs.get("a", ())) < 20:
        bench.step()
    assert tiers.stats().sunk >= 20 // PAGE_TOKENS
    bench.run().close()
