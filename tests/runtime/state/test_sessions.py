"""Salts, hints of sessions, and what requests are told about the prefix cache."""

from __future__ import annotations

import pytest
from history_model import HYBRID, PAGE_TOKENS, STATES, VOCAB, Bench, answer

from treadle.runtime.request import Abort, RequestError, SessionHint

A = [(i * i + 1) % VOCAB for i in range(26)]
B = [(i * 5 + 2) % VOCAB for i in range(26)]


def ask(bench: Bench, name: str, prompt: list[int], **fields: object):
    """Run a request to its end, and return its first output."""
    bench.add(name, prompt, max_tokens=3, **fields)
    bench.run()
    assert bench.tokens(name) == answer(prompt, 3)
    return bench.outputs[name][0]


@pytest.mark.parametrize("state", sorted(STATES))
def test_a_request_is_told_where_its_tokens_were_and_why_others_were_not(state: str) -> None:
    bench = Bench(state=STATES[state], checkpoint_tokens=1)
    first, again = ask(bench, "first", A), ask(bench, "again", A)
    assert (first.num_cached_tokens, first.cached_tokens, first.missed_tokens) == (0, {}, {"cold": 26})
    cached = again.num_cached_tokens
    assert cached >= 26 - PAGE_TOKENS - 1
    assert again.cached_tokens == {"device": cached}
    assert again.missed_tokens == {"below_granularity": 26 - cached}
    other = ask(bench, "salted", A, salt="tenant")
    assert (other.num_cached_tokens, sum(other.missed_tokens.values())) == (0, 26)
    assert other.missed_tokens["salt"] >= 20
    assert ask(bench, "salted again", A, salt="tenant").num_cached_tokens == cached
    assert ask(bench, "skipping", A, skip_reading_prefix_cache=True).missed_tokens == {"opted_out": 26}
    stats = bench.engine.stats()
    assert stats.prefix_missed_tokens["opted_out"] == 26
    assert sum(stats.prefix_missed_tokens.values()) == 5 * 26 - 2 * cached
    bench.close()


@pytest.mark.parametrize("state", sorted(STATES))
def test_what_was_evicted_comes_back_from_a_tier_or_is_called_evicted(state: str) -> None:
    for host_bytes in (0, 1 << 20):
        bench = small(state, host_bytes=host_bytes)
        cached = [ask(bench, f"{n}", A).num_cached_tokens for n in range(2)][1]
        crowd(bench)
        back = ask(bench, "back", A)
        assert sum(back.cached_tokens.values()) == back.num_cached_tokens
        assert sum(back.missed_tokens.values()) == 26 - back.num_cached_tokens
        if host_bytes:
            assert back.cached_tokens["host"] > 0
            assert back.num_cached_tokens >= cached - PAGE_TOKENS
            stats = bench.engine.stats()
            assert stats.external_hit_tokens >= back.cached_tokens["host"]
            assert stats.external_query_tokens >= stats.external_hit_tokens
        else:
            assert back.missed_tokens["evicted"] > 0
        bench.close()


def small(state: str, **options: object) -> Bench:
    """Return an engine whose arena holds about two of these prompts."""
    return Bench(
        **{"state": STATES[state], "num_pages": 16, "others": 9, "checkpoint_tokens": 1, "max_len": 60} | options
    )


def crowd(bench: Bench, count: int = 12) -> None:
    """Run so many other prompts."""
    for n in range(count):
        ask(bench, f"other {n}", [(n + i) % VOCAB for i in B])


def session(**hints: object) -> dict[str, SessionHint]:
    return {"session": SessionHint(id="s", **hints)}


@pytest.mark.parametrize("state", sorted(STATES))
def test_a_pinned_session_stays_and_a_demoted_one_goes_first(state: str) -> None:
    def left(count: int, before: int = 0, **hints: object) -> int:
        """Return what is still there of a session after so many others, and others ``before``."""
        bench = small(state, num_pages=32, others=20)
        for n in range(before):
            ask(bench, f"before {n}", [(3 * n + i * i) % VOCAB for i in B])
        ask(bench, "mine", A, **session(**hints))
        crowd(bench, count)
        stats = bench.engine.stats()
        assert (stats.sessions_pinned, stats.pinned_bytes > 0) == ((1, True) if hints.get("pin_s") else (0, False))
        found = ask(bench, "back", A, **session()).num_cached_tokens
        assert bench.engine.stats().sessions_pinned == 0
        bench.close()
        return found

    # As many others as it takes to push it out.
    count = next(count for count in range(1, 100) if left(count) == 0)
    assert left(count, pin_s=60) >= 26 - PAGE_TOKENS - 1
    # Others before it are older, and go before it unless it is demoted.
    assert left(2, count - 1, demote=True) < left(2, count - 1)


@pytest.mark.parametrize("state", sorted(STATES))
def test_pins_end_in_time_and_make_nobody_wait(state: str) -> None:
    bench = small(state, max_len=2000)
    ask(bench, "mine", A, **session(pin_s=3600))
    assert bench.engine.stats().sessions_pinned == 1
    # As long as the arena allows: the lease ends.
    with pytest.raises(RequestError) as refused:
        bench.add("longest", B, max_tokens=2000)
    most = int(str(refused.value).rpartition(" ")[2])
    bench.add("longest", B, max_tokens=most)
    bench.run()
    assert bench.tokens("longest") == answer(B, most)
    stats = bench.engine.stats()
    assert (stats.sessions_pinned, stats.pinned_bytes) == (0, 0)
    ask(bench, "mine again", A, **session(pin_s=1e-6))
    ask(bench, "another", [1, 2])
    stats = bench.engine.stats()
    assert stats.sessions_pinned == 0
    assert stats.session_hints == {"pin": 2, "demote": 0, "prefetch": 0}
    assert all(kind.used_bytes == 0 for kind in stats.state_kinds.values())
    bench.close()


@pytest.mark.parametrize("state", sorted(STATES))
def test_a_prefetch_brings_state_up_and_computes_nothing(state: str) -> None:
    bench = small(state, host_bytes=1 << 20)
    ask(bench, "mine", A)
    crowd(bench)
    steps = bench.model.steps
    bench.add("prefetch", A, max_tokens=3, **session(prefetch=True, pin_s=30))
    bench.run()
    (output,) = bench.outputs["prefetch"]
    assert (output.token_ids, output.finish_reason) == ([], "length")
    assert output.num_cached_tokens >= 20
    assert output.cached_tokens["host"] > 0
    assert sum(output.cached_tokens.values()) == output.num_cached_tokens
    assert output.missed_tokens == {"below_granularity": len(A) - output.num_cached_tokens}
    assert bench.model.steps == steps
    stats = bench.engine.stats()
    assert (stats.session_hints["prefetch"], stats.sessions_pinned) == (1, 1)
    back = ask(bench, "back", A, **session())
    assert back.cached_tokens == {"device": back.num_cached_tokens}
    assert back.num_cached_tokens >= 20
    bench.close()


def test_a_prefetch_of_nothing_ends_and_one_may_be_aborted() -> None:
    bench = Bench(state=HYBRID)
    bench.add("nothing", A, max_tokens=3, **session(prefetch=True))
    bench.run()
    assert [output.finish_reason for output in bench.outputs["nothing"]] == ["length"]
    assert bench.outputs["nothing"][0].num_cached_tokens == 0
    assert bench.outputs["nothing"][0].missed_tokens == {"cold": len(A)}
    assert not any(bench.engine.stats().prefix_missed_tokens.values()), "nothing was computed"
    bench.add("left", A, max_tokens=3, **session(prefetch=True))
    bench.engine.abort(Abort(id="left"))
    bench.run()
    assert [output.finish_reason for output in bench.outputs["left"]] == ["abort"]
    assert not bench.engine.has_work
    bench.close()
