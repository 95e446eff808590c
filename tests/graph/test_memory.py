"""The memory plan: exact where it says so, arithmetic that can be checked by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_plans import GIB, LLAMA_8B, WORK, described, plan
from oracle import tiny

from treadle.graph.build import BuildOptions, build
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.expert_rows import workspace_bytes
from treadle.graph.family import family_for, load_spec
from treadle.graph.footprint import RUNTIME_BYTES, attention_tokens, largest, token_weight_bytes
from treadle.graph.layer_state import state_of
from treadle.graph.memory import MemoryPlan, MemoryPlanError, plan_memory
from treadle.graph.source import open_source
from treadle.graph.state import StateBuilder
from treadle.graph.weights import RopeRows, leaves
from treadle.graph.workspace import CHOICE_BYTES, INVARIANT_ROWS, PARTIAL_BYTES, WIDENED_BYTES
from treadle.passes.quantize import Quantize

EXACT = (
    "gemma4-moe",
    "gemma4-shared",
    "inkling",
    "deepseek-v4",
    "hy-v4",
    "minimax",
    "recurrent-gemma",
    "rwkv",
    "deepseek-v3",
    "deepseek-v32",
    "axk2",
    "llama",
    "llama-bias",
    "llama-tied",
    "qwen2",
    "qwen3-tied",
    "gemma2",
    "gemma3",
    "gemma3-untied-capped",
    "mixtral",
    "qwen3-moe",
    "hy-v3",
    "gpt-oss-mxfp4",
    "cohere2-moe",
    "qwen3-next",
    "falcon-h1",
    "falcon-mamba-options",
    "nemotron-h",
    "lfm2-options",
)


QWEN_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MOE = described(QWEN_MOE)


def bytes_of(made: MemoryPlan, kind: str, item: str = "") -> int:
    return sum(row.nbytes for row in made.rows if row.kind == kind and item in row.item)


def test_llama_8b_by_hand() -> None:
    made = plan()
    embed = head = 128256 * 4096
    attn = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2)
    mlp = 32 * 3 * 4096 * 14336
    norms = 65 * 4096
    assert bytes_of(made, "weights") == 2 * (embed + head + attn + mlp + norms)
    assert [row.item for row in made.rows if row.kind == "weights"] == [
        "embedding",
        "norms and biases",
        "attn",
        "mlp",
        "head",
    ]
    assert bytes_of(made, "tables", "rope") == 4096 * 128 * 4
    assert made.kv.page_bytes == 32 * 2 * 8 * 128 * 2 * 16
    assert bytes_of(made, "state") == made.arena_bytes == (made.num_pages + 1) * made.kv.page_bytes
    assert made.total_bytes + made.free_bytes == 24 * GIB
    assert made.full_sequences == made.num_pages // 256


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", EXACT)
def test_weights_are_exact(name: str, quantize: str) -> None:
    """The rows of weights and tables add up to the bytes of the graph that will be loaded."""
    source = open_source(tiny(name).path)
    spec = load_spec(family_for(source.config), source.config)
    checkpoint = Checkpoint(source, spec)
    graph = build(spec, checkpoint.weights, BuildOptions(dtype="bfloat16", max_len=64, page_tokens=4))
    if quantize == "int8":
        graph = Quantize()(graph)
    work = replace(WORK, quantize=quantize, max_len=64, page_tokens=4, memory_bytes=4 * GIB)
    made = plan_memory(spec, checkpoint.weights, work)
    ropes = sum(expr.nbytes for expr in graph.weights if isinstance(expr, RopeRows))
    assert bytes_of(made, "tables", "rope") == ropes
    assert bytes_of(made, "weights") == sum(expr.nbytes for expr in graph.weights if leaves(expr))
    assert made.state == graph.state


def test_int8_halves_weights_and_names_scales() -> None:
    made = plan(quantize="int8")
    quantised = sum(bytes_of(made, "weights", item) for item in ("attn", "mlp")) + 128256 * 4096
    assert bytes_of(made, "weights", "int8 scales") == quantised // 32 * 4
    assert bytes_of(made, "weights", "mlp") * 2 == bytes_of(plan(), "weights", "mlp")
    assert bytes_of(made, "weights", "embedding") == bytes_of(plan(), "weights", "embedding"), (
        "it is looked up, not multiplied"
    )


def test_experts_of_a_gpu_are_not_quantised() -> None:
    made = plan_memory(*MOE, replace(WORK, quantize="int8", device="cuda", memory_bytes=80 * GIB))
    assert bytes_of(made, "weights", "experts") == 3 * 2 * 128 * 2048 * 768 * 2
    assert bytes_of(made, "weights", "int8 scales") > 0


def test_a_token_visits_some_experts_only() -> None:
    spec, weights = MOE
    rows = plan_memory(spec, weights, replace(WORK, memory_bytes=80 * GIB)).rows
    outside = sum(row.nbytes for row in rows if row.kind == "weights" and row.item not in ("embedding", "experts"))
    assert token_weight_bytes(spec, rows) == outside + 8 * 3 * 2 * 2048 * 768 * 2
    all_of_them = load_spec("qwen3_moe", {**QWEN_MOE, "num_experts_per_tok": 128})
    assert attention_tokens(spec, weights) < attention_tokens(all_of_them, weights) / 4


def test_a_gpu_holds_each_pair_of_token_and_expert_once() -> None:
    spec, weights = MOE
    made = plan_memory(spec, weights, replace(WORK, device="cuda", memory_bytes=80 * GIB))
    experts = bytes_of(made, "workspace", "experts")
    assert experts == workspace_bytes(512, 8, 128, 2048, 768, 2)
    assert 512 * 8 * (2048 + 768) * 2 < experts < 1.01 * 512 * 8 * (2048 + 768) * 2
    assert bytes_of(made, "graphs") > experts
    assert not bytes_of(plan(device="cuda"), "workspace", "experts")


def test_arena_on_a_cpu_is_modest() -> None:
    enough = plan(memory_bytes=100 * GIB, max_num_seqs=4)
    assert enough.num_pages == 4 * 256 + 1, "no more than the workload can use"
    half = plan()
    left = half.free_bytes + half.arena_bytes
    assert left // 2 - half.kv.page_bytes <= half.arena_bytes <= left // 2 + half.kv.page_bytes
    tight = plan(memory_bytes=half.total_bytes - half.arena_bytes + 258 * half.kv.page_bytes, max_num_seqs=2)
    assert tight.full_sequences == 1, "one full sequence, even if that is all that is left"


def test_arena_on_a_gpu_takes_what_is_left() -> None:
    made = plan(device="cuda", memory_bytes=80 * GIB, max_num_seqs=4)
    assert 0 <= made.free_bytes < made.kv.page_bytes
    assert bytes_of(made, "runtime") == RUNTIME_BYTES["cuda"]


def test_given_arena_is_kept() -> None:
    made = plan(kv_bytes=GIB)
    assert GIB - made.kv.page_bytes < made.arena_bytes <= GIB
    assert plan(kv_bytes=made.arena_bytes, max_len=made.max_len).num_pages == made.num_pages, (
        "planning again changes nothing"
    )


def test_length_nobody_asked_for() -> None:
    assert plan(max_len=None, device="cuda", memory_bytes=139 * GIB).max_len == 131072
    made = plan(max_len=None)
    assert 0 < made.max_len < 131072
    assert made.free_bytes >= made.arena_bytes - 2 * made.kv.page_bytes, "half of what is left stays free"
    assert made.largest_context > made.max_len


def test_largest_number_of_sequences() -> None:
    count = plan(memory_bytes=40 * GIB).largest_num_seqs
    arena = (count * 256 + 2) * plan().kv.page_bytes
    assert plan(memory_bytes=40 * GIB, max_num_seqs=count, kv_bytes=arena).full_sequences == count
    more = (count * 256 + 258) * plan().kv.page_bytes
    assert plan(memory_bytes=40 * GIB, max_num_seqs=count + 1, kv_bytes=more).full_sequences == count


@settings(deadline=None, max_examples=50)
@given(
    memory=st.integers(18, 160),
    length=st.integers(1, 40_000),
    seqs=st.integers(1, 600),
    kv_gib=st.none() | st.integers(1, 40),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_more_sequences_than_now_is_never_fewer(
    memory: int, length: int, seqs: int, kv_gib: int | None, device: str
) -> None:
    changes: dict[str, Any] = {"memory_bytes": memory * GIB, "max_num_seqs": seqs, "max_len": length, "device": device}
    try:
        made = plan(kv_bytes=kv_gib and kv_gib * GIB, **changes)
    except MemoryPlanError:
        return
    assert made.full_sequences <= min(made.max_num_seqs, made.largest_num_seqs)
    assert made.largest_num_seqs == plan(**changes).largest_num_seqs, "whatever the arena is now"


@settings(deadline=None)
@given(limit=st.integers(1, 5000), border=st.integers(0, 6000))
def test_largest_finds_the_border(limit: int, border: int) -> None:
    assert largest(limit, lambda number: number <= border) == min(limit, border)


@settings(deadline=None, max_examples=50)
@given(memory=st.integers(17, 60), length=st.integers(1, 131072), seqs=st.integers(1, 64), cuda=st.booleans())
def test_a_plan_never_takes_more_than_there_is(memory: int, length: int, seqs: int, cuda: bool) -> None:
    changes = {"memory_bytes": memory * GIB, "max_num_seqs": seqs, "device": "cuda" if cuda else "cpu"}
    try:
        made = plan(max_len=length, **changes)
    except MemoryPlanError as error:
        suggestion = re.search(r"model\.max_len=(\d+)", " ".join(error.nearest))
        assert suggestion is None or plan(max_len=int(suggestion[1]), **changes).free_bytes >= 0
        return
    assert made.free_bytes >= 0
    assert made.num_pages >= made.kv.pages_for(length) + 1
    assert made.num_pages >= seqs


def test_state_lists_layers_in_order() -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    spec = load_spec("gemma3_text", {**LLAMA_8B, **layers, "head_dim": 64})
    state = state_of(spec, {}, StateBuilder("float32", 8)).full
    assert [(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in state.layers] == [(8, 64, 64)] * 2


def test_latents_take_one_row_a_token_and_a_choice_of_keys_its_workspace() -> None:
    source = open_source(tiny("glm-moe-dsa").path)
    spec = load_spec("glm_moe_dsa", source.config)
    weights = Checkpoint(source, spec).weights
    kept = state_of(spec, weights, StateBuilder("bfloat16", 16)).full.layers
    latent, index = ("latent", 1, 40, 0), ("index", 1, 24, 0)
    found = [(layer.kind, layer.kv_heads, layer.k_dim, layer.v_dim) for layer in kept]
    assert found == [latent, index, latent, latent, index, latent, latent]
    work = replace(WORK, device="cuda", memory_bytes=8 * GIB, max_len=64)
    made = plan_memory(spec, weights, work)
    assert bytes_of(made, "workspace", "choice of keys") == 2 * CHOICE_BYTES
    assert bytes_of(plan(device="cuda"), "workspace", "choice of keys") == 0


@pytest.mark.parametrize(("case", "copies"), [("inkling", 1), ("inkling-options", 2)])
def test_a_bias_by_distance_is_planned(case: str, copies: int) -> None:
    config = dict(open_source(tiny(case).path).config)
    work = replace(WORK, device="cuda", max_len=64)
    far, near = (plan_memory(*described({**config, "rel_extent": extent}), work) for extent in (9000, 8000))
    more = bytes_of(far, "workspace", "activations") - bytes_of(near, "workspace", "activations")
    assert more == 512 * 2 * copies * 1000 * config["num_attention_heads"]


def test_a_choice_of_blocks_is_planned() -> None:
    spec, weights = described(dict(open_source(tiny("minimax-m3").path).config))
    made = plan_memory(spec, weights, replace(WORK, device="cuda", max_len=64))
    assert bytes_of(made, "workspace", "choice of keys") == 2 * CHOICE_BYTES


def test_counts_and_masks_of_tokens_are_planned_and_a_history_only_for_processors() -> None:
    made, remembered = plan(), plan(processors=True)
    vocab = 128256
    one_slot = vocab * 2 + vocab // 32 * 4 + 32 * 8 * 4 + 8 * 4 + 512 * 8 + 64 * 4
    assert bytes_of(made, "tables", "penalties and masks") == 33 * one_slot
    assert bytes_of(made, "tables", "logits processors") == 0
    assert bytes_of(remembered, "tables", "logits processors") == 33 * 4096 * 4
    assert (made.processors, remembered.processors) == (False, True)
    assert made.num_pages == remembered.num_pages
    assert made.free_bytes - remembered.free_bytes == 33 * 4096 * 4


def test_kernels_of_a_gpu_have_what_they_leave_in_memory() -> None:
    """Parts of attention, and int8 weights widened for large steps: for launched steps and for captured ones."""
    rows = {quantize: plan(device="cuda", quantize=quantize) for quantize in ("none", "int8")}
    assert bytes_of(rows["none"], "workspace", "attention in parts") == PARTIAL_BYTES
    assert bytes_of(plan(), "workspace", "attention in parts") == 0
    for kind in ("workspace", "graphs"):
        assert bytes_of(rows["int8"], kind) - bytes_of(rows["none"], kind) == WIDENED_BYTES


def test_blocks_of_rows_are_planned_whole():
    sizes = {"max_num_seqs": 3, "max_step_tokens": 130, "device": "cuda", "memory_bytes": 80 * GIB}
    expected = plan(**sizes | {"max_num_seqs": INVARIANT_ROWS, "max_step_tokens": 2 * INVARIANT_ROWS})
    workspace = [row.nbytes for row in expected.rows if row.kind in ("workspace", "graphs")]
    assert [
        row.nbytes for row in plan(**sizes, deterministic=True).rows if row.kind in ("workspace", "graphs")
    ] == workspace
    assert plan(**sizes | {"device": "cpu"}, deterministic=True).rows == plan(**sizes | {"device": "cpu"}).rows
