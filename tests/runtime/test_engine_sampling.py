"""What requests ask of sampling, through the whole step loop: as a plain loop over one sequence would do it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from history_model import PAGE_TOKENS, PROMPT, VOCAB, Bench, add, answer, choices, logits_after
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_mode import NATIVE

from treadle.kernels import sample_triton
from treadle.runtime.request import Abort, SamplingParams


def logprobs_after(tokens: list[int]) -> list[float]:
    return torch.tensor(logits_after(tokens)).log_softmax(-1).tolist()


def plain(prompt: list[int], count: int, params: SamplingParams, words: tuple[tuple[int, ...], ...] = ()) -> list[int]:
    """Return the greedy answer under all that changes logits, in vLLM's order."""
    out: list[int] = []
    for _ in range(count):
        row = logits_after(prompt + out)
        seen, counts = {*prompt, *out}, Counter(out)
        for token in range(VOCAB):
            allowed = params.allowed_token_ids
            bad = any(word[-1] == token and out[len(out) - len(word) + 1 :] == [*word[:-1]] for word in words)
            if (allowed is not None and token not in allowed) or bad:
                row[token] = -math.inf
            row[token] += (params.logit_bias or {}).get(token, 0.0)
            if token in seen:
                penalty = params.repetition_penalty
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
            row[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        out.append(max(range(VOCAB), key=row.__getitem__))
    return out


CHANGES: list[tuple[dict[str, object], tuple[tuple[int, ...], ...]]] = [
    ({"presence_penalty": 1.5}, ()),
    ({"frequency_penalty": 0.75}, ()),
    ({"repetition_penalty": 1.4}, ()),
    ({"repetition_penalty": 0.7, "frequency_penalty": -0.5}, ()),
    ({"logit_bias": {7: 2.5, 3: -4.0, 11: 1.0}}, ()),
    ({"allowed_token_ids": (2, 5, 7, 19, 23)}, ()),
    ({}, ((8,), (12,), (0,))),
    ({}, tuple((a, b) for a in range(8) for b in (3, 17, 20))),
    ({"presence_penalty": 1, "logit_bias": {4: 3.0}, "allowed_token_ids": tuple(range(1, 20))}, ((4, 4), (6, 4, 4))),
]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_pages", [64, 12])
def test_every_change_is_the_plain_one_in_any_company(captured: bool, num_pages: int) -> None:
    """Slots are reused, prompts come in chunks and from the prefix tree, sequences are preempted."""
    bench = Bench(captured=captured, num_pages=num_pages, max_num_seqs=3, max_step_tokens=7)
    for again in "ab":
        for index, (params, words) in enumerate(CHANGES):
            add(bench, f"{again}{index}", [*PROMPT, index], words, **params)
            bench.add(f"{again}plain{index}", [*PROMPT, index], max_tokens=12)
            bench.step()
    bench.run()
    changed = 0
    for index, (params, words) in enumerate(CHANGES):
        expected = plain([*PROMPT, index], 12, SamplingParams(**params), words)
        changed += expected != answer([*PROMPT, index], 12)
        for again in "ab":
            assert bench.tokens(f"{again}{index}") == expected, params
            assert bench.tokens(f"{again}plain{index}") == answer([*PROMPT, index], 12)
    assert changed == len(CHANGES)
    assert (bench.engine.stats().preemptions > 0) == (num_pages == 12)
    assert bench.engine.stats().prefix_hit_tokens > 0
    bench.close()


@pytest.mark.skipif(NATIVE, reason="tensors on the CPU need the interpreter")
def test_the_kernels_of_a_gpu_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, captured: the same tokens as plain torch."""

    def run() -> dict[str, list[int]]:
        bench = Bench(captured=True, max_num_seqs=2, max_step_tokens=16)
        for index, (params, words) in enumerate(CHANGES[::2]):
            add(bench, f"r{index}", PROMPT, words, **{**params, "max_tokens": 5})
        add(bench, "hot", PROMPT, temperature=1.5, seed=4, top_k=9, frequency_penalty=1.0, logprobs=1, max_tokens=5)
        found = bench.run().outputs
        bench.close()
        return {name: [token for output in outputs for token in output.token_ids] for name, outputs in found.items()}

    plain_torch = run()
    monkeypatch.setattr("treadle.runtime.stepper.token_kernels", lambda device: sample_triton)
    assert run() == plain_torch


def test_penalties_work_on_draws_and_with_the_models_log_probabilities() -> None:
    bench = Bench()
    hot = {"temperature": 0.8, "seed": 3, "max_tokens": 20}
    add(bench, "a", PROMPT, frequency_penalty=1.9, logprobs=2, **hot)
    add(bench, "b", PROMPT, **hot)
    bench.run()
    found = bench.tokens("a")
    assert max(Counter(found).values()) < max(Counter(bench.tokens("b")).values())
    for index, output in enumerate(bench.outputs["a"]):
        assert output.logprobs is not None
        expected = logprobs_after(PROMPT + found[:index])
        assert output.logprobs[0].logprob == pytest.approx(expected[found[index]], abs=1e-4)
    bench.close()


def test_a_sequence_that_comes_back_brings_all_that_its_slot_must_know() -> None:
    params = {"frequency_penalty": 0.5, "logit_bias": {3: -4.0, 9: 0.5}, "logprob_token_ids": [3]}
    start = plain(PROMPT, 5, SamplingParams(**params))
    words = ((start[2], start[3], start[4]), (start[3],) * 8)
    expected = plain(PROMPT, 9, SamplingParams(**params), words)
    assert expected[:4] == start[:4]
    bench = Bench(overlap=False)
    add(bench, "a", PROMPT, words, max_tokens=9, **params)
    while len(bench.outputs.get("a", [])) < 4:
        bench.step()
    scheduler = bench.engine._scheduler
    scheduler._preempt(scheduler.running[0])
    # What others leave in its slot meanwhile.
    for each in bench.engine._stepper._slots.controls[1:]:
        each.fill_(5)
    bench.run()
    assert bench.tokens("a") == expected
    for index, output in enumerate(bench.outputs["a"]):
        assert output.logprobs is not None
        assert output.logprobs[0].asked_logprobs == pytest.approx(
            [logprobs_after(PROMPT + expected[:index])[3]], abs=1e-4
        )
    bench.close()


def test_the_engines_seed_makes_a_run_repeat() -> None:
    def run(seed: int | None) -> list[list[int]]:
        bench = Bench(seed=seed)
        for name in "ab":
            add(bench, name, PROMPT, temperature=1.5)
        bench.run().close()
        return [bench.tokens(name) for name in "ab"]

    first = run(5)
    assert first[0] != first[1]
    assert run(5) == first
    assert run(6) != first
    assert run(None) != first


def test_greedy_steps_stay_the_cheapest_variant() -> None:
    bench = Bench(captured=True)
    kinds: list[int] = []
    for step in bench.engine._stepper._captured.values():
        for index, replay in enumerate(step.samples):
            object.__setattr__(
                step,
                "samples",
                (*step.samples[:index], lambda i=index, r=replay: (kinds.append(i), r()), *step.samples[index + 1 :]),
            )
    bench.add("a", PROMPT, max_tokens=4)
    bench.run()
    assert set(kinds) == {0}
    add(bench, "b", PROMPT, presence_penalty=1.0)
    bench.run()
    assert set(kinds) == {0, 2}
    bench.close()


def alone(prompt: list[int], seed: int, **params: object) -> list[int]:
    bench = Bench()
    bench.add("x", prompt, **{"temperature": 1.0, "max_tokens": 9, "seed": seed} | params)
    bench.run()
    bench.close()
    return bench.tokens("x")


@pytest.mark.parametrize("length", [1, 3, 4, 8, 11, 30])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"prefix_cache": False}, {"captured": True}])
def test_answers_of_one_prompt_compute_it_once(length: int, options: dict[str, bool]) -> None:
    prompt = [(7 * i + 3) % VOCAB for i in range(length)]
    bench = Bench(max_num_seqs=6, max_step_tokens=12, **options)
    names = choices(bench, "r", prompt, 5, presence_penalty=0.5, logit_bias={3: 0.5})
    computed = bench.run().engine.stats().computed_tokens
    assert computed == length + 5 * 8
    for index, name in enumerate(names):
        assert bench.tokens(name) == alone(prompt, 40 + index, presence_penalty=0.5, logit_bias={3: 0.5})
    assert len({tuple(bench.tokens(name)) for name in names}) > 1
    assert bench.engine.stats().prompt_tokens == length
    bench.close()


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 14),
    n=st.integers(2, 9),
    num_pages=st.integers(9, 30),
    max_num_seqs=st.integers(1, 5),
    overlap=st.booleans(),
    captured=st.booleans(),
    script=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4),
)
def test_answers_of_one_prompt_under_any_pressure(
    length: int,
    n: int,
    num_pages: int,
    max_num_seqs: int,
    overlap: bool,
    captured: bool,
    script: list[tuple[int, int]],
) -> None:
    prompt = [(5 * i + 1) % VOCAB for i in range(length)]
    bench = Bench(captured=captured, num_pages=num_pages, max_num_seqs=max_num_seqs, max_step_tokens=6, overlap=overlap)
    bench.add("before", [2] * 6, max_tokens=14)
    names = choices(bench, "r", prompt, n, temperature=0.0, frequency_penalty=0.5)
    bench.add("after", [1, 2], max_tokens=6)
    aborted = set()
    for victim, steps in script:
        for _ in range(steps):
            bench.step()
        name = f"r-{victim}"
        if name in bench.engine._sequences:
            aborted.add(name)
            bench.engine.abort(Abort(id=name))
    bench.run()
    expected = plain(prompt, 9, SamplingParams(frequency_penalty=0.5))
    for name in names:
        found = bench.tokens(name)
        assert found == expected[: len(found)]
        assert name in aborted or found == expected
    assert bench.tokens("before") == answer([2] * 6, 14)
    assert bench.tokens("after") == answer([1, 2], 6)
    scheduler = bench.engine._scheduler
    scheduler.memory.cache.tree.clear()
    assert (scheduler.memory.pages.used, scheduler.memory.pages.num_refs) == (0, 0)
    bench.close()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_pages", [64, 11])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_scored_token_by_token(captured: bool, num_pages: int, overlap: bool) -> None:
    bench = Bench(captured=captured, num_pages=num_pages, max_num_seqs=3, max_step_tokens=6, overlap=overlap)
    prompts = {name: PROMPT + [ord(name) % VOCAB] * 3 for name in "abc"}
    bench.add("before", [*PROMPT, 1], max_tokens=9)
    bench.run()
    for name, prompt in prompts.items():
        bench.add(name, prompt, prompt_logprobs=2 if name != "b" else 0, max_tokens=9)
    bench.add("beside", [*PROMPT, 2], max_tokens=9)
    bench.run()
    assert bench.tokens("beside") == answer([*PROMPT, 2], 9)
    for name, prompt in prompts.items():
        first, *rest = [output for output in bench.outputs[name] if output.token_ids]
        assert first.prompt_logprobs is not None
        assert all(output.prompt_logprobs is None for output in rest)
        assert first.num_cached_tokens == 0
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for position, found in enumerate(first.prompt_logprobs, start=1):
            expected = logprobs_after(prompt[:position])
            order = sorted(range(VOCAB), key=lambda token: -expected[token])
            assert found.logprob == pytest.approx(expected[prompt[position]], abs=1e-4)
            assert found.rank == order.index(prompt[position]) + 1
            assert found.top_ids == order[: 0 if name == "b" else 2]
        assert bench.tokens(name) == answer(prompt, 9)
    # Never more rows of logits at a time than a step may sample from.
    assert max(bench.model.head_rows) <= (4 if captured else 3)
    bench.add("hit", prompts["a"], max_tokens=2)
    bench.run()
    assert bench.outputs["hit"][0].num_cached_tokens > 0
    bench.close()


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_asked_for_by_id_come_with_every_token(captured: bool) -> None:
    bench = Bench(captured=captured)
    bench.add("a", PROMPT, logprob_token_ids=[9, 2], max_tokens=3)
    bench.add("b", PROMPT, logprobs=1, max_tokens=3)
    bench.run()
    found = answer(PROMPT, 3)
    for index, (asked, usual) in enumerate(zip(bench.outputs["a"], bench.outputs["b"])):
        expected = logprobs_after(PROMPT + found[:index])
        assert asked.logprobs is not None
        assert usual.logprobs is not None
        assert asked.logprobs[0].asked_logprobs == pytest.approx([expected[9], expected[2]], abs=1e-4)
        assert asked.logprobs[0].logprob == pytest.approx(expected[found[index]], abs=1e-4)
        assert (asked.logprobs[0].top_ids, usual.logprobs[0].asked_logprobs) == ([], [])
    bench.close()


def test_a_fork_takes_pages_of_its_own_for_what_differs() -> None:
    bench = Bench(max_num_seqs=4)
    choices(bench, "r", PROMPT[: PAGE_TOKENS + 2], 3)
    bench.step()
    first, *others = bench.engine._scheduler.running
    assert [each.pages[0] for each in others] == [first.pages[0]] * 2
    assert len({each.pages[1] for each in (first, *others)}) == 3
    bench.run().close()


@settings(deadline=None, max_examples=30)
@given(
    script=st.lists(
        st.tuples(st.integers(0, len(CHANGES)), st.integers(1, 12), st.integers(0, 4), st.integers(-9, 9)),
        min_size=2,
        max_size=7,
    ),
    num_pages=st.integers(9, 20),
    max_num_seqs=st.integers(1, 3),
    overlap=st.booleans(),
    captured=st.booleans(),
)
def test_nothing_of_one_request_reaches_another(
    script: list[tuple[int, int, int, int]], num_pages: int, max_num_seqs: int, overlap: bool, captured: bool
) -> None:
    """Changed and plain requests in few slots, preempted, aborted and from the prefix tree."""
    bench = Bench(captured=captured, overlap=overlap, num_pages=num_pages, max_num_seqs=max_num_seqs, max_step_tokens=6)
    expected: dict[str, list[int]] = {}
    aborted = set()
    for index, (change, length, steps, victim) in enumerate(script):
        params, words = (*CHANGES, ({}, ()))[change]
        prompt = (PROMPT * 2)[:length]
        add(bench, f"r{index}", prompt, words, **params)
        expected[f"r{index}"] = plain(prompt, 12, SamplingParams(**params), words)
        for _ in range(steps):
            bench.step()
        name = f"r{victim}"
        if name in bench.engine._sequences:
            aborted.add(name)
            bench.engine.abort(Abort(id=name))
    bench.run()
    for name, whole in expected.items():
        found = bench.tokens(name)
        assert found == whole[: len(found)]
        assert name in aborted or found == whole
    bench.close()
