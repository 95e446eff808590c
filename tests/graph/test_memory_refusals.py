"""What the memory plan refuses, and that what it proposes instead works as it is written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_plans import GIB, LLAMA_8B, WORK, described, plan

from treadle.conf.size import parse_bytes
from treadle.graph.memory import MemoryPlanError, plan_memory


def numbers(error: pytest.ExceptionInfo[MemoryPlanError], key: str) -> int:
    found = re.search(rf"{re.escape(key)}=([\w.]+)", "; ".join([*error.value.nearest, error.value.hint]))
    assert found, str(error.value)
    return parse_bytes(found[1])


def test_too_long_names_a_length_that_works() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"model\.max_len=131072: one such sequence needs an arena of 16\.01 GiB"
    ) as error:
        plan(max_len=131072)
    longest = numbers(error, "model.max_len")
    assert plan(max_len=longest).max_len == longest == plan().largest_context
    with pytest.raises(MemoryPlanError):
        plan(max_len=longest + 16)


def test_longer_than_the_model_was_made_for() -> None:
    with pytest.raises(MemoryPlanError, match="made for 131072 tokens") as error:
        plan(max_len=200_000, device="cuda", memory_bytes=139 * GIB)
    assert numbers(error, "model.max_len") == 131072
    spec, weights = described({**LLAMA_8B, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    work = replace(WORK, max_len=200_000, device="cuda", memory_bytes=139 * GIB)
    assert plan_memory(spec, weights, work).max_len == 200_000


def test_model_too_large_names_the_memory_it_needs() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"hardware\.memory=8\.00 GiB: the model does not fit .*passes\.quantize=int8"
    ) as error:
        plan(memory_bytes=8 * GIB)
    assert plan(memory_bytes=numbers(error, "hardware.memory")).max_len == 4096


@settings(deadline=None, max_examples=30)
@given(
    memory=st.integers(1, 40_000),
    length=st.none() | st.integers(1, 100_000),
    seqs=st.integers(1, 300),
    kv_mib=st.none() | st.integers(1, 30_000),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_each_suggestion_is_accepted_as_it_is_written(
    memory: int, length: int | None, seqs: int, kv_mib: int | None, device: str
) -> None:
    names = {"hardware.memory": "memory_bytes", "kv.memory": "kv_bytes", "model.max_len": "max_len"}
    names["scheduler.max_num_seqs"] = "max_num_seqs"
    work: dict[str, Any] = {"memory_bytes": memory << 20, "max_len": length, "max_num_seqs": seqs, "device": device}
    work["kv_bytes"] = kv_mib and kv_mib << 20
    suggestions: tuple[str, ...] = ()
    try:
        plan(**work)
    except MemoryPlanError as error:
        suggestions = error.nearest or ("none",)
    for suggestion in suggestions:
        said = dict(text.split("=") for text in suggestion.split())
        followed = {**work, **{names[key]: parse_bytes(value) for key, value in said.items()}}
        made = plan(**followed)
        asked = followed["kv_bytes"]
        assert asked is None or asked - made.arena_bytes < made.kv.page_bytes, suggestion


def test_arena_too_small_names_one_that_works() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"kv\.memory=1\.00 MiB: even one token needs an arena of 6\.00 MiB"
    ) as error:
        plan(kv_bytes=1 << 20)
    assert plan(kv_bytes=numbers(error, "kv.memory")).full_sequences == 1


def test_more_sequences_than_pages() -> None:
    page = plan().kv.page_bytes
    with pytest.raises(MemoryPlanError, match=r"scheduler\.max_num_seqs=32: every sequence needs a page") as error:
        plan(kv_bytes=20 * page, max_len=64)
    count = numbers(error, "scheduler.max_num_seqs")
    assert (count, plan(kv_bytes=20 * page, max_len=64, max_num_seqs=count).num_pages) == (19, 19)


def test_too_many_rows_of_logits() -> None:
    room = sum(row.nbytes for row in plan().rows if row.kind in ("weights", "runtime"))
    with pytest.raises(MemoryPlanError, match="row of logits") as error:
        plan(max_num_seqs=4096, memory_bytes=room + GIB, max_len=16)
    count = numbers(error, "scheduler.max_num_seqs")
    assert plan(max_num_seqs=count, memory_bytes=room + GIB, max_len=16).max_len == 16
