from __future__ import annotations

import logging

import pytest
from capturing_backend import CapturingBackend
from history_model import KV, PAGE_TOKENS, STATE, VOCAB, Bench, answer
from hypothesis import strategies as st

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.engine import EngineDied, EngineSettings
from treadle.runtime.request import Abort, QueueFull, RequestError
from treadle.runtime.state.arena import Arena, ArenaError
from treadle.runtime.state.memory import arena_kinds

POISON = VOCAB - 1
tokens = st.integers(0, POISON - 1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_step_tokens", [4, 7, 64])
def test_requests_together_answer_as_alone(overlap: bool, max_step_tokens: int) -> None:
    prompts = {f"r{n}": [(n * 5 + i * i) % VOCAB for i in range(1 + 3 * n)] for n in range(9)}
    bench = Bench(overlap=overlap, max_step_tokens=max_step_tokens)
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=5 + len(prompt) % 4)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 5 + len(prompt) % 4)
        assert bench.reason(name) == "length"
    assert max(bench.model.step_tokens) <= max_step_tokens
    bench.close()


@pytest.mark.parametrize("max_step_tokens", [20, 64])
def test_captured_steps_answer_as_launched_ones(max_step_tokens: int) -> None:
    prompts = {f"r{n}": [(n * 5 + i * i) % VOCAB for i in range(1 + 5 * n)] for n in range(9)}
    bench = Bench(captured=True, max_step_tokens=max_step_tokens, max_num_seqs=5)
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=5 + len(prompt) % 4)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 5 + len(prompt) % 4)
    backend = bench.backend
    assert isinstance(backend, CapturingBackend)
    # A program and its sampling each. Steps of 17 to 20 tokens have no bucket where 20 is the most, and are launched.
    steps = bench.model.step_tokens
    launched = [tokens for tokens in steps if tokens not in (1, 2, 4, 5, 16, 32, 64)]
    assert (max(launched, default=0) > 16) == (max_step_tokens == 20)
    assert backend.replayed == 2 * (len(steps) - len(launched))
    bench.close()


def test_overlap_launches_a_step_before_it_collects_the_last() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=3)
    assert bench.step() == []
    assert [output.token_ids for output in bench.step()] == [answer([1, 2, 3], 1)]
    bench.run()
    # Length is known ahead: no row is computed for nothing.
    assert sum(bench.model.step_tokens) == 3 + 2
    bench.close()


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    bench = Bench(overlap=False, max_step_tokens=8)
    bench.add("short", [1, 2], max_tokens=12)
    bench.step()
    bench.add("long", list(range(20)) * 2, max_tokens=1)
    for _ in range(6):
        assert next(output.id for output in bench.step()) == "short"
    bench.run()
    bench.close()


def test_end_of_sequence_and_stop_ids() -> None:
    prompt = [3, 1, 4]
    expected = answer(prompt, 12)
    assert len(set(expected[:6])) > 3
    end = expected[4]
    cut = expected[: expected.index(end) + 1]
    bench = Bench()
    bench.add("eos", prompt, eos_ids=(end,), max_tokens=12)
    bench.add("stop", prompt, stop_token_ids=(end,), max_tokens=12)
    bench.add("ignore", prompt, eos_ids=(end,), ignore_eos=True, max_tokens=12)
    bench.run()
    assert bench.tokens("eos") == bench.tokens("stop") == cut
    assert bench.tokens("ignore") == expected
    assert [bench.reason(name) for name in ("eos", "stop", "ignore")] == ["stop", "stop", "length"]
    assert bench.outputs["eos"][-1].stop_reason is None
    assert bench.outputs["stop"][-1].stop_reason == end
    assert bench.engine.stats().finished == {"stop": 2, "length": 1}
    bench.close()


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1, "top_p": 1, "min_p": 0}])
def test_whole_numbers_may_stand_where_fractions_are_meant(params: dict[str, object]) -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=3, **params)
    sequence = bench.engine._sequences["a"]
    assert all(type(value) is float for value in (sequence.params.temperature, sequence.params.top_p))
    assert len(bench.run().tokens("a")) == 3
    bench.close()


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1], {"temperature": 0.5, "top_k": 5.5}, "top_k"),
        ([1], {"temperature": "hot"}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"seed": 2**70}, "seed"),
        ([1], {"top_k": 2**70}, "top_k"),
        ([1], {"max_tokens": 2.5}, "max_tokens"),
        ([1], {"stop_token_ids": (VOCAB,), "min_tokens": 2}, "stop_token_ids"),
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
    ],
)
def test_values_that_no_step_can_take_are_refused_and_spare_the_engine(
    prompt: list[int], params: dict[str, object], field: str
) -> None:
    bench = Bench()
    with pytest.raises(RequestError) as caught:
        bench.add("bad", prompt, **params)
    assert caught.value.field == field
    bench.add("good", [1, 2, 3], max_tokens=2)
    assert bench.run().tokens("good") == answer([1, 2, 3], 2)
    bench.close()


def test_min_tokens_forbids_the_end() -> None:
    prompt = [3, 1, 4]
    end = answer(prompt, 1)[0]
    bench = Bench()
    bench.add("a", prompt, eos_ids=(end,), min_tokens=6, max_tokens=9)
    bench.run()
    found = bench.tokens("a")
    assert end not in found[:6]
    assert len(found) >= 6
    assert found[0] != end
    bench.close()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [9, 13, 20])
def test_preemption_changes_no_token_and_everyone_finishes(overlap: bool, prefix_cache: bool, num_pages: int) -> None:
    prompts = {f"r{n}": [(n * 7 + i) % VOCAB for i in range(8)] for n in range(8)}
    bench = Bench(num_pages=num_pages, overlap=overlap, prefix_cache=prefix_cache)
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=24)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 24)
    stats = bench.engine.stats()
    assert stats.preemptions > 0
    # Hysteresis: being pushed out and coming back is not the ordinary state.
    assert stats.preemptions <= 3 * len(prompts)
    bench.close()


def test_the_oldest_always_advances() -> None:
    bench = Bench(num_pages=9, overlap=False)
    for n in range(4):
        bench.add(f"r{n}", [n, n + 1, n + 2, n + 3], max_tokens=30)
    done: list[str] = []
    while bench.engine.has_work:
        before = len(bench.outputs.get("r0", []))
        done += [output.id for output in bench.step() if output.finish_reason]
        assert "r0" in done or len(bench.outputs["r0"]) == before + 1
    assert done == ["r0", "r1", "r2", "r3"]
    bench.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_frees_slot_and_pages_within_a_step(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    for n in range(6):
        bench.add(f"r{n}", [n] * 20, max_tokens=100)
    for _ in range(10):
        bench.step()
    for n in range(6):
        bench.engine.abort(Abort(id=f"r{n}"))
    outputs = bench.step()
    assert sorted((output.id, output.finish_reason) for output in outputs) == [(f"r{n}", "abort") for n in range(6)]
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    assert not bench.engine.has_work
    assert bench.step() == []
    bench.close()


def test_an_abort_keeps_only_the_tokens_that_count() -> None:
    prompt = [1, 2, 3, 4]
    bench = Bench()
    bench.add("a", prompt, max_tokens=40)
    while len(bench.outputs.get("a", [])) < 20:
        bench.step()
    bench.engine.abort(Abort(id="a", keep=9))
    bench.run()
    assert bench.reason("a") == "stop"
    bench.add("b", prompt + answer(prompt, 30), max_tokens=4)
    bench.run()
    assert bench.outputs["b"][0].num_cached_tokens == 12
    assert bench.tokens("b") == answer(prompt + answer(prompt, 30), 4)
    bench.close()


def test_aborting_what_is_not_there_is_harmless() -> None:
    bench = Bench()
    bench.engine.abort(Abort(id="nobody"))
    assert not bench.engine.has_work
    bench.close()


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    bench = Bench(poison=POISON)
    bench.add("good", [1, 2, 3], eos_ids=(POISON,), max_tokens=20)
    bench.add("bad", [1, 2, 3, 4, POISON, 5, 6, 7, 8, 9])
    bench.run()
    assert bench.tokens("good") == answer([1, 2, 3], 20, (POISON,))
    assert bench.reason("bad") == "error"
    assert bench.tokens("bad") == []
    assert "not finite" in (bench.outputs["bad"][-1].error or "")
    bench.add("again", [1, 2, 3, 4, POISON, 5, 6, 7, 8, 9])
    bench.run()
    # Pages that gave NaN are not offered to others.
    assert bench.outputs["again"][-1].num_cached_tokens == 0
    bench.close()


def test_a_failing_program_ends_the_engine_with_its_cause() -> None:
    bench = Bench()
    bench.model.fail_at = 3
    bench.add("a", [1, 2, 3])
    with pytest.raises(EngineDied, match="the program broke") as caught:
        bench.run()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(EngineDied):
        bench.step()
    bench.engine.close()


def test_requests_that_can_never_run_are_refused() -> None:
    bench = Bench(num_pages=5)
    fits = 5 * PAGE_TOKENS
    with pytest.raises(RequestError, match="empty") as caught:
        bench.add("a", [])
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=f"at most {fits - 1}"):
        bench.add("a", [1] * fits)
    with pytest.raises(RequestError, match="at most 10") as caught:
        bench.add("a", [1] * 10, max_tokens=11)
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError, match="at most 32"):
        bench.add("a", [1], eos_ids=tuple(range(33)))
    bench.add("a", [1] * 10, max_tokens=10)
    with pytest.raises(RequestError, match="is running"):
        bench.add("a", [1])
    bench.run()
    assert len(bench.tokens("a")) == 10
    bench.add("open", [1] * 10, max_tokens=None)
    bench.run()
    assert len(bench.tokens("open")) == 10
    bench.close()


def test_a_full_queue_refuses_and_the_others_finish() -> None:
    bench = Bench(max_num_seqs=2, max_queue=3)
    for n in range(5):
        bench.add(f"r{n}", [n, 1, 2])
    with pytest.raises(QueueFull, match="max_queue=3"):
        bench.add("late", [1])
    bench.run()
    bench.add("late", [1])
    bench.run()
    assert bench.tokens("late") == answer([1], 8)
    bench.close()


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens=8"):
        EngineSettings(max_len=64, max_num_seqs=8, max_step_tokens=4, vocab=8)
    with pytest.raises(ArenaError):
        Arena(CpuBackend(threads=1), KV.page_bytes - 1, arena_kinds(STATE), scratch_bytes=KV.page_bytes)
    with pytest.raises(ArenaError):
        Bench(num_pages=0)


def test_leaked_pages_are_named_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(num_pages=16)
    scheduler = bench.engine._scheduler
    scheduler.memory.pages.take(3, "culprit")
    bench.add("a", list(range(12)))
    bench.step()
    scheduler.memory.cache.tree.lock(scheduler.running[0].node)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        bench.run()
    assert "culprit leaked 3 pages" in caplog.text
    assert "request a leaked 3 pages" in caplog.text
    assert bench.engine.stats().pages_used == 0
    memory = scheduler.memory
    assert memory.arena.available(0) + memory.cache.tree.evictable == 16
    bench.add("b", list(range(12)))
    bench.run()
    assert bench.tokens("b") == bench.tokens("a")
    bench.close()


def test_queue_time_and_counters() -> None:
    bench = Bench(max_num_seqs=1)
    for name in "ab":
        bench.add(name, [1, 2, 3], max_tokens=4)
    assert bench.engine.stats().num_waiting == 2
    bench.run()
    for name in "ab":
        first, *rest = bench.outputs[name]
        assert first.queue_s is not None
        assert all(output.queue_s is None for output in rest)
    stats = bench.engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.computed_tokens) == (6, 8, 12)
    assert stats.steps == 8
    assert stats.pages_total == 64
    bench.close()


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    hot = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 16}
    alone = Bench()
    alone.add("a", [1, 2, 3], seed=7, **hot)
    alone.run()
    crowd = Bench(num_pages=14, overlap=False)
    crowd.add("x", [4] * 9, max_tokens=16)
    crowd.add("a", [1, 2, 3], seed=7, **hot)
    crowd.add("y", [5] * 9, temperature=0.7, top_k=5, max_tokens=16, logprobs=2)
    crowd.add("other", [1, 2, 3], seed=8, **hot)
    crowd.run()
    assert crowd.engine.stats().preemptions > 0
    assert crowd.tokens("a") == alone.tokens("a")
    assert crowd.tokens("other") != alone.tokens("a")
    assert [len(output.logprobs or []) for output in crowd.outputs["y"] if output.token_ids] == [1] * 16
    for bench in (alone, crowd):
        bench.close()
