"""What the prefix cache finds, and why it does not find more."""

from __future__ import annotations

from dataclasses import replace

from history_model import HYBRID, PAGE_TOKENS, STATE, VOCAB, Bench, answer


def missed(bench: Bench) -> dict[str, int]:
    return {reason: count for reason, count in bench.engine.stats().prefix_missed_tokens.items() if count}


def test_a_conversation_hits_the_prefix_cache_generated_tokens_included() -> None:
    prompt = list(range(10))
    bench = Bench()
    bench.add("first", prompt, max_tokens=8)
    bench.run()
    longer = prompt + bench.tokens("first") + [5, 6]
    bench.add("second", longer)
    bench.run()
    assert bench.tokens("second") == answer(longer, 8)
    # 17 of the 18 tokens were computed; 4 pages are full.
    assert bench.outputs["second"][0].num_cached_tokens == 16
    stats = bench.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (30, 16)
    bench.close()


def test_the_row_launched_after_the_end_is_not_taken_for_state() -> None:
    prompt = [1, 2, 3]
    end = answer(prompt, 5)[4]
    assert end not in answer(prompt, 4)
    bench = Bench()
    bench.add("first", prompt, eos_ids=(end,), max_tokens=20)
    bench.run()
    # Two full pages are known, but the state of their last token was never computed.
    longer = prompt + bench.tokens("first") + [5]
    assert len(longer) == 2 * PAGE_TOKENS + 1
    bench.add("second", longer)
    bench.run()
    assert bench.outputs["second"][0].num_cached_tokens == PAGE_TOKENS
    assert bench.tokens("second") == answer(longer, 8)
    bench.close()


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    prompt = [i % VOCAB for i in range(32)]
    bench = Bench(max_step_tokens=64)
    for name in "abcd":
        bench.add(name, prompt, max_tokens=4)
    bench.run()
    for name in "abcd":
        assert bench.tokens(name) == answer(prompt, 4)
    # The last page of the others is computed again, for its logits.
    assert bench.model.step_tokens[0] == 32 + 3 * PAGE_TOKENS
    bench.close()


def test_the_whole_prompt_is_never_taken_from_the_cache() -> None:
    prompt = list(range(8))
    bench = Bench()
    for name in ("cold", "warm"):
        bench.add(name, prompt)
        bench.run()
    assert bench.tokens("cold") == bench.tokens("warm") == answer(prompt, 8)
    assert bench.outputs["warm"][0].num_cached_tokens == 4
    bench.close()


def test_without_prefix_cache_nothing_is_kept() -> None:
    bench = Bench(prefix_cache=False)
    for name in ("a", "b"):
        bench.add(name, list(range(12)))
        bench.run()
    assert bench.tokens("a") == bench.tokens("b")
    assert bench.engine.stats().prefix_hit_tokens == 0
    bench.close()


def test_every_miss_has_a_reason() -> None:
    prompt = [i % VOCAB for i in range(12)]
    bench = Bench()
    expected: dict[str, int] = {}
    for name, tokens, salt, more in (
        ("first", prompt, None, {"cold": 12}),
        ("again", prompt, None, {"below_granularity": 4}),
        ("longer", [*prompt, 3, 3], None, {"below_granularity": 2}),
        ("parted", [*prompt[:6], 9, 9, 9], None, {"cold": 5}),
        ("tenant", prompt, "tenant", {"salt": 12}),
        ("scored", prompt, None, {"opted_out": 12}),
    ):
        params = {"prompt_logprobs": 0} if name == "scored" else {}
        bench.add(name, tokens, salt=salt, max_tokens=1, **params)
        bench.run()
        assert bench.tokens(name) == answer(tokens, 1)
        expected = {reason: expected.get(reason, 0) + more.get(reason, 0) for reason in {*expected, *more}}
        assert missed(bench) == expected, name
    bench.engine._scheduler.memory.cache.tree.clear()
    bench.add("late", prompt, max_tokens=1)
    bench.run()
    assert missed(bench) == expected | {"evicted": 12}
    bench.close()


def test_without_prefix_cache_everything_is_opted_out() -> None:
    bench = Bench(prefix_cache=False)
    bench.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    bench.run()
    assert missed(bench) == {"opted_out": 5}
    bench.close()


def test_a_hybrid_counts_what_lies_behind_its_last_checkpoint() -> None:
    stem = [(i * 7) % VOCAB for i in range(30)]
    bench = Bench(state=HYBRID)
    bench.add("a", [*stem, 1, 1, 1], max_tokens=1)
    bench.run()
    bench.add("b", [*stem, 2, 2, 2], max_tokens=1)
    bench.run()
    # The checkpoint of the first lies at 32, behind where they part.
    assert missed(bench) == {"cold": 33 + 5, "below_granularity": 28}
    bench.engine._scheduler.memory.cache.tree.drop(
        next(each for each in bench.engine._scheduler.memory.cache.snapshots if each.position == 28)
    )
    bench.add("c", [*stem, 3, 3, 3], max_tokens=1)
    bench.run()
    assert missed(bench) == {"cold": 38 + 5, "below_granularity": 28, "evicted": 28}
    bench.close()


def test_a_common_beginning_is_found_from_the_third_request_on_however_short_the_rest_is() -> None:
    stem = [(i * 7) % VOCAB for i in range(200)]
    bench = Bench(state=HYBRID)
    cache = bench.engine._scheduler.memory.cache
    cache.policy = replace(cache.policy, least_tokens=64)
    found = []
    for own in range(4):
        prompt = [*stem, *[own + 1] * 10]
        bench.add(str(own), prompt, max_tokens=2)
        bench.run()
        assert bench.tokens(str(own)) == answer(prompt, 2)
        found.append(bench.outputs[str(own)][0].num_cached_tokens)
    assert found == [0, 0, 200, 200]
    bench.close()


def test_salts_share_nothing() -> None:
    prompt = [i % VOCAB for i in range(20)]
    bench = Bench()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        bench.add(name, prompt, salt=salt)
        bench.run()
    cached = [bench.outputs[name][0].num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, 16, 0]
    bench.close()


def test_thinking_that_a_template_strips_goes_first() -> None:
    """Ten turns in memory for the last one and a fifth: what every turn leaves behind does not push the rest out."""
    for state in (STATE, HYBRID):
        history = [(i * 5) % VOCAB for i in range(12)]
        total = 12 + 10 * (4 + 4)
        bench = Bench(state=state, num_pages=-(-total * 12 // 10 // PAGE_TOKENS) + 14, others=12, max_num_seqs=2)
        # Another conversation, as old as the first turn, must not pay for it.
        other = [(i * 11 + 2) % VOCAB for i in range(16)]
        bench.add("other", other, max_tokens=2)
        bench.run()
        for turn in range(10):
            prompt = [*history, 1, 2, 3, turn]
            bench.add(f"{turn}", prompt, max_tokens=24)
            bench.run()
            assert bench.tokens(f"{turn}") == answer(prompt, 24)
            # Twenty tokens of thinking are dropped.
            history = prompt + bench.tokens(f"{turn}")[20:]
            if turn:
                lost = len(prompt) - bench.outputs[f"{turn}"][0].num_cached_tokens
                assert lost <= 4 + 4 + 4 + 2 * PAGE_TOKENS
        bench.add("other again", other, max_tokens=2)
        bench.run()
        assert bench.outputs["other again"][0].num_cached_tokens >= 12
        bench.close()
