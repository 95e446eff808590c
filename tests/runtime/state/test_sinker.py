"""What leaves the device: everything once, while it still lies where it was."""

from __future__ import annotations

from array import array

import pytest
from history_model import STATES, VOCAB, Bench, answer

from treadle.runtime.state.node import TOKEN_TYPE
from treadle.runtime.state.sinker import MOST_TAILS


@pytest.mark.parametrize("name", sorted(STATES))
def test_everything_is_sent_once(name: str) -> None:
    bench = Bench(state=STATES[name], host_bytes=1 << 18)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    prompt = [(i * 7) % VOCAB for i in range(30)]
    for request in "ab":
        bench.add(request, prompt, max_tokens=5)
        bench.run()
        assert bench.tokens(request) == answer(prompt, 5)
        if request == "a":
            sunk = tiers.stats().sunk
    assert sunk >= 8
    # The second time there is nothing new.
    assert tiers.stats().sunk == sunk
    assert not bench.engine._memory.busy
    assert bench.engine._memory.promised == 0
    assert bench.engine.stats().pages_used == 0
    bench.close()


def test_little_is_on_its_way_at_a_time() -> None:
    bench = Bench(host_bytes=1 << 18, flight_bytes=512)
    tiers = bench.engine._memory.tiers
    assert tiers is not None
    most, sink = [0], tiers.sink

    def counting(objects):  # type: ignore[no-untyped-def]
        most[0] = max(most[0], sum(each.num_bytes for each in objects))
        return sink(objects)

    tiers.sink = counting  # type: ignore[method-assign]
    prompt = [(i * 7) % VOCAB for i in range(60)]
    bench.add("a", prompt, max_tokens=4)
    bench.run()
    assert most == [512]
    assert tiers.stats().sunk == 15
    bench.close()


def test_a_host_too_small_costs_time_and_nothing_else() -> None:
    bench = Bench(host_bytes=2048, num_pages=20, max_len=64)
    prompts = {f"r{n}": [(n * 7 + i) % VOCAB for i in range(24)] for n in range(6)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=20)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 20)
    stats = bench.engine.stats()
    assert sum(bench.model.step_tokens) - 6 * 43 == sum(stats.recomputed_tokens.values()) > 0
    bench.close()


def test_of_many_short_prompts_the_latest_tails_are_known() -> None:
    """All are behind no page: a lookup tries each, so that they must not grow without end."""
    bench = Bench(state=STATES["recurrent"], host_bytes=1 << 20)
    sinker = bench.engine._memory._sinker
    prompts = [[n % VOCAB, n // VOCAB] for n in range(MOST_TAILS + 20)]
    for n, prompt in enumerate(prompts):
        bench.add(f"{n}", prompt, max_tokens=2)
        bench.run()
    (tails,) = sinker.tails.values()
    assert len(tails) == MOST_TAILS
    latest = array(TOKEN_TYPE, [*prompts[-1], *answer(prompts[-1], 1)]).tobytes()
    assert list(tails)[-1] == latest
    bench.close()
