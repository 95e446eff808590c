"""The memory plan of models whose state has several kinds: windowed pages and blocks beside full pages."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.size import parse_bytes
from treadle.graph import layer_state
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.demand import Demand
from treadle.graph.family import family_for, load_spec
from treadle.graph.layer_state import Kept
from treadle.graph.memory import MemoryPlan, MemoryPlanError, Workload, plan_memory
from treadle.graph.resolve import resolve
from treadle.graph.source import DummySource
from treadle.graph.spec import Mlp
from treadle.graph.state import BlockPart
from treadle.serve.commands.memory import run

MIB, GIB = 1 << 20, 1 << 30
CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "max_position_embeddings": 32768,
}
SPEC = load_spec(family_for(CONFIG), CONFIG)
WEIGHTS = dict(Checkpoint(DummySource(CONFIG), SPEC).weights)
WORK = Workload(dtype="bfloat16", max_num_seqs=8, max_len=4096, max_step_tokens=256, memory_bytes=4 * GIB)
PAGE = 2 * 2 * 64 * 2 * 16
"""bytes of a layer's part of a page"""
PART = 32 * 64 * 64 * 4


@pytest.fixture(autouse=True)
def hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every layer half a MiB that it keeps besides."""
    part = BlockPart(kind="delta", shape=(32, 64, 64), dtype="float32")
    monkeypatch.setitem(layer_state.KEEPS, Mlp, lambda op, weights: Kept(appended={}, parts={"state": part}))


def plan(**changes: Any) -> MemoryPlan:
    return plan_memory(SPEC, WEIGHTS, replace(WORK, **changes))


def state_rows(made: MemoryPlan) -> dict[str, int]:
    return {row.item: row.nbytes for row in made.rows if row.kind == "state"}


def test_every_kind_has_a_row() -> None:
    made = plan()
    assert [(kind.name, kind.item_bytes) for kind in made.kinds] == [
        ("kv", 2 * PAGE),
        ("window 512", 10 * PAGE),
        ("block", 12 * PART),
    ]
    # a window of 512 and a step of 256 are 49 pages, of a token 34
    counts = (8 * 256, 49 + 7 * 34, 8)
    assert [kind.planned_bytes for kind in made.kinds] == [n * kind.item_bytes for n, kind in zip(counts, made.kinds)]
    rows = state_rows(made)
    assert sum(rows.values()) == made.arena_bytes
    assert rows["kv, 2048 pages of 16 tokens"] == 2048 * 2 * PAGE
    assert rows["window 512, 287 pages of 16 tokens"] == 287 * 10 * PAGE
    assert rows["block, 8 blocks"] == 8 * 12 * PART
    assert rows["scratch"] == 12 * PART
    assert made.full_sequences == 8
    assert made.beside_bytes == 34 * 10 * PAGE + 12 * PART
    assert made.total_bytes + made.free_bytes == 4 * GIB


def test_an_arena_that_nobody_chose_has_room_for_checkpoints_on_a_cpu() -> None:
    made = plan()
    assert made.arena_bytes < made.memory_bytes // 4, "modest"
    (kept,) = [size for item, size in state_rows(made).items() if item.startswith("beside")]
    assert kept >= 8 * (12 * PART + 34 * 10 * PAGE)
    assert made.checkpoint_bytes == made.arena_bytes - made.state.scratch_bytes
    assert plan(memory_bytes=made.total_bytes - MIB).arena_bytes < made.arena_bytes


def test_what_is_promised_fits_and_no_more() -> None:
    made = plan(kv_bytes=80 * MIB)
    demand = Demand(made.state, 256)
    assert 1 <= made.full_sequences < 8
    assert demand.fits(demand.running(made.full_sequences, 4096), made.arena_bytes)
    assert not demand.fits(demand.running(made.full_sequences + 1, 4096), made.arena_bytes)
    assert plan(kv_bytes=made.arena_bytes) == made, "planning again changes nothing"


def test_a_gpu_gives_all_that_is_left() -> None:
    made = plan(device="cuda")
    assert 0 <= made.free_bytes < 256
    assert made.largest_num_seqs > 100


def numbers(error: pytest.ExceptionInfo[MemoryPlanError], key: str) -> int:
    found = re.search(rf"{re.escape(key)}=([\w.]+)", "; ".join(error.value.nearest))
    assert found, str(error.value)
    return parse_bytes(found[1])


def test_too_small_an_arena_names_one_that_works() -> None:
    with pytest.raises(MemoryPlanError, match=r"kv\.memory=1\.00 MiB: even one token needs an arena of") as error:
        plan(kv_bytes=MIB)
    assert plan(kv_bytes=numbers(error, "kv.memory")).full_sequences == 1


def test_too_long_names_a_length_that_works() -> None:
    with pytest.raises(MemoryPlanError, match=r"model\.max_len=32768: one such sequence needs an arena of") as error:
        plan(max_len=32768, kv_bytes=50 * MIB)
    longest = numbers(error, "model.max_len")
    assert plan(max_len=longest, kv_bytes=50 * MIB).full_sequences == 1
    assert 4096 < longest < 32768


def test_windows_make_long_sequences_cheap() -> None:
    unseen = load_spec(family_for(CONFIG), {**CONFIG, "layer_types": ["full_attention"] * 12})
    tight = replace(WORK, kv_bytes=60 * MIB, max_len=None)
    whole = plan_memory(unseen, WEIGHTS, tight).largest_context
    assert plan(kv_bytes=60 * MIB, max_len=None).largest_context > 3 * whole


def test_checkpoints_are_bounded() -> None:
    assert plan(kv_bytes=400 * MIB, checkpoints=0.25).checkpoint_bytes == 100 * MIB
    assert plan(kv_bytes=400 * MIB, checkpoints=30 * MIB).checkpoint_bytes == 30 * MIB
    assert plan(kv_bytes=400 * MIB, checkpoints=GIB).checkpoint_bytes == 394 * MIB
    without = plan(checkpoints=0)
    assert without.checkpoint_bytes == 0
    assert without.arena_bytes < plan().arena_bytes, "no room is set aside for what nobody keeps"


@pytest.mark.parametrize(("given", "spelled"), [(MIB, "1048576"), (0.01, "1%")])
def test_too_small_a_bound_names_one_that_holds_a_checkpoint(given: float, spelled: str) -> None:
    message = rf"kv\.checkpoints={spelled}: that is .*, and a checkpoint of this model takes 8\.66 MiB"
    with pytest.raises(MemoryPlanError, match=message) as error:
        plan(kv_bytes=400 * MIB, checkpoints=given)
    enough = numbers(error, "kv.checkpoints")
    assert plan(kv_bytes=400 * MIB, checkpoints=enough).checkpoint_bytes == enough


def test_a_deployment_may_bound_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ["model=hf", f"model.path='{tmp_path}'", "model.weights=dummy", "hardware.memory=4GiB", "kv.memory=200MiB"]
    made = resolve(compose([*given, "kv.checkpoints=25%"]))
    assert made.plan.checkpoint_bytes == 50 * MIB
    assert made.deployment.kv.checkpoints == str(50 * MIB)
    assert resolve(made.deployment).plan == made.plan
    assert resolve(compose([*given, "kv.checkpoints=auto"])).plan.checkpoint_bytes == 194 * MIB
    assert resolve(compose([*given, "kv.checkpoints=30MiB"])).plan.checkpoint_bytes == 30 * MIB
    assert resolve(compose([*given, "kv.prefix_cache=false"])).plan.checkpoint_bytes == 0
    with pytest.raises(ConfigError, match=r"kv\.checkpoints=0: holds nothing"):
        compose([*given, "kv.checkpoints=0"])


def test_every_kind_is_printed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ["model=hf", f"model.path='{tmp_path}'", "model.weights=dummy", "hardware.memory=4GiB", "kv.memory=200MiB"]
    made = resolve(compose(given))
    out = io.StringIO()
    assert run(made, Console(file=out, width=200)) == 0
    text = out.getvalue()
    for kind in made.plan.kinds:
        assert f"{kind.name}, " in text
        assert f"{kind.planned_bytes:,}" in text
    assert f"{made.plan.beside_bytes:,}" in text
    assert f"{194 * MIB:,}" in text
