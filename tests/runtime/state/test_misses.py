from __future__ import annotations

from arenas import make_arena
from history_model import PAGE_TOKENS, RECURRENT, STATE, VOCAB, Bench

from treadle.runtime.request import Request, SamplingParams
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.misses import Misses
from treadle.runtime.state.prefix import PrefixTree
from treadle.runtime.state.snapshots import Snapshots


def test_of_every_computed_token_there_is_one_reason() -> None:
    arena = make_arena(STATE, {0: 16})
    tree = PrefixTree(arena.pool(0), PAGE_TOKENS, Snapshots(arena.pools, [256]))
    misses = Misses(tree, PAGE_TOKENS)
    tree.on_release(misses.note_pages)

    def ask(prompt: list[int], salt: str | None = None, **params: object) -> dict[str, int]:
        request = Request(id="a", prompt=prompt, params=SamplingParams(**params), cache_salt=salt)
        sequence = Sequence(request, order=0, max_tokens=1, seed=0, arrival_s=0.0)
        match = tree.match(sequence.readable, salt)
        reasons = {reason: count for reason, count in misses.explain(sequence, match, True).items() if count}
        assert sum(reasons.values()) == len(prompt) - match.position
        return reasons

    prompt = list(range(16))
    sequence = Sequence(
        Request(id="a", prompt=prompt, params=SamplingParams()), order=0, max_tokens=1, seed=0, arrival_s=0.0
    )
    pages = arena.pool(0).take(4, "a")
    assert ask(prompt) == {"cold": 16}
    tree.insert(sequence.tokens, pages)
    arena.pool(0).release(pages)
    assert ask(prompt) == {"below_granularity": 4}
    assert ask(prompt[:10]) == {"below_granularity": 2}
    # What is no whole page has one reason, whether or not it was seen.
    assert ask([*prompt[:10], 99]) == {"below_granularity": 3}
    assert ask([*prompt[:10], 99, 99]) == {"cold": 4}
    assert ask([*prompt, 99]) == {"below_granularity": 1}
    assert ask([*prompt[:9], *[99] * 9], "tenant") == {"salt": 8, "cold": 10}
    assert ask(prompt, prompt_logprobs=1) == {"opted_out": 16}
    tree.evict(2)
    assert ask(prompt) == {"evicted": 8}
    assert ask([*prompt, 99]) == {"evicted": 8, "below_granularity": 1}
    assert ask([*prompt[:12], 5, 5, 5, 5, 5]) == {"evicted": 4, "cold": 5}
    misses.add({"evicted": 4, "cold": 5})
    assert (misses.tokens["evicted"], misses.tokens["cold"], misses.tokens["salt"]) == (4, 5, 0)


def test_pages_that_nothing_goes_on_from_were_of_no_use_before_they_were_evicted() -> None:
    """However large the arena is, the reason is the same."""
    prompts = [[(i * n + n) % VOCAB for i in range(24)] for n in range(3, 16)]
    for num_pages in 10, 200:
        bench = Bench(state=RECURRENT, num_pages=num_pages, others=10, checkpoint_tokens=64, max_len=30)
        for turn, prompt in enumerate([*prompts, prompts[0]]):
            bench.add(f"{turn}", prompt, max_tokens=2)
            bench.run()
        assert bench.outputs["13"][0].missed_tokens == {"below_granularity": 24}
        bench.close()
