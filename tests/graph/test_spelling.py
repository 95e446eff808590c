"""Files of every age describe the same decoder: what transformers 5 writes, and what the hub's files say."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import CASES, tiny

from treadle.graph.family import family_for, load_spec
from treadle.graph.footprint import ops
from treadle.graph.spec import Attention, Mamba1, ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "hidden_act": "silu"}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4}


def attentions(spec: ModelSpec) -> list[Attention]:
    return [op for op in ops(spec) if isinstance(op, Attention)]


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as it was before ``rope_parameters``."""
    rope = {**config["rope_parameters"]}
    theta, partial = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    kind = rope.pop("rope_type")
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": theta, "torch_dtype": config["dtype"]}
    old["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    return old if partial is None else {**old, "partial_rotary_factor": partial}


@pytest.mark.parametrize("name", CASES)
def test_rope_beside_and_inside_its_own_map(name: str) -> None:
    config = tiny(name).config
    rope = config.get("rope_parameters")
    if rope is None or "rope_theta" not in rope:
        return
    family = family_for(config)
    assert load_spec(family, older(config)).layers == load_spec(family, config).layers


@pytest.mark.parametrize(
    ("family", "config", "dim", "theta"),
    [
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 55.0}, 8, 55.0),
        ("gpt_neox", {}, 4, 10000.0),
        ("phi", {}, 8, 10000.0),
        ("stablelm", {"rope_theta": 7.0}, 4, 7.0),
        ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 4, "rotary_dim": 6, "hidden_size": None}, 6, 10000.0),
    ],
)
def test_a_part_of_a_head_turns(family: str, config: dict[str, Any], dim: int, theta: float) -> None:
    table = attentions(load_spec(family, {**SIZES, **LAYERS, **config}))[0].rope
    assert table is not None
    assert (table.dim, table.theta) == (dim, theta)


@pytest.mark.parametrize(
    ("family", "config", "kinds"),
    [
        ("cohere2", {"sliding_window_pattern": 3}, "SSFS"),
        ("cohere2", {"layer_types": [FULL, SLIDING, FULL, SLIDING]}, "FSFS"),
        ("exaone4", {"sliding_window_pattern": 4}, "SSSF"),
        ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": [SLIDING, FULL, SLIDING, FULL]}, "SFSF"),
        ("exaone4", {"sliding_window": None}, "FFFF"),
        ("cwm", {}, "FSSS"),
        ("olmo3", {}, "SSSF"),
        ("granite_swa", {}, "FSSS"),
        ("ministral", {}, "SSSS"),
        ("vaultgemma", {}, "SFSF"),
    ],
)
def test_which_layers_have_a_window(family: str, config: dict[str, Any], kinds: str) -> None:
    spec = load_spec(family, {**SIZES, **LAYERS, "sliding_window": 8, **config})
    assert "".join("S" if op.window else "F" for op in attentions(spec)) == kinds


def test_which_layers_know_positions() -> None:
    for family in ("cohere2", "exaone4"):
        found = [op.rope is not None for op in attentions(load_spec(family, {**SIZES, **LAYERS}))]
        assert found == [True, True, True, False]
    spec = load_spec("smollm3", {**SIZES, **LAYERS, "no_rope_layers": [0, 1, 1, 0]})
    assert [op.rope is not None for op in attentions(spec)] == [False, True, True, False]


def test_olmo3_stretches_only_layers_that_see_all() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    old = load_spec("olmo3", {**SIZES, **LAYERS, "rope_theta": 5e5, "rope_scaling": yarn})
    both = {FULL: {**yarn, "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    assert old.layers == load_spec("olmo3", {**SIZES, **LAYERS, "rope_parameters": both}).layers
    kinds = [op.rope.scaling.rope_type for op in attentions(old) if op.rope is not None]
    assert kinds == ["default", "default", "default", "yarn"]


def test_phi3_says_the_original_length_outside_of_the_scaling() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    table = attentions(load_spec("phi3", {**SIZES, **LAYERS, **lengths, "rope_scaling": scaling}))[0].rope
    assert table is not None
    assert (table.scaling.rope_type, table.original, table.factor) == ("longrope", 512, 8.0)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "RefinedWebModel", "n_head": 4, "n_layer": 4, "multi_query": True}, "falcon"),
        ({"model_type": "bloom", "n_embed": 64, "hidden_size": None, "n_layer": 4, "num_attention_heads": 4}, "bloom"),
    ],
)
def test_names_of_sizes_that_early_files_have(config: dict[str, Any], family: str) -> None:
    assert family_for(config) == family
    spec = load_spec(family, {**SIZES, "intermediate_size": None, **config})
    assert (spec.hidden, len(spec.layers), attentions(spec)[0].heads) == (64, 4, 4)


MAMBA = {"num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_state": 8, "n_groups": 1, "mamba_num_heads": 4}
LETTERS = {"Attention": "*", "Mamba2": "M", "Mamba1": "M", "Delta": "D", "ShortConv": "C", "Mlp": "-", "Moe": "E"}


@pytest.mark.parametrize(
    ("family", "config", "kinds"),
    [
        ("qwen3_next", {}, "DDD*"),
        ("qwen3_next", {"full_attention_interval": 2}, "D*D*"),
        ("qwen3_5_text", {"layer_types": ["full_attention", *["linear_attention"] * 3]}, "*DDD"),
        ("bamba", {"attn_layer_indices": [2]}, "MM*M"),
        ("bamba", {}, "MMMM"),
        ("granitemoehybrid", {"layers_block_type": ["mamba", "attention", "mamba", "mamba"]}, "M*MM"),
        ("granitemoehybrid", {}, "MMMM"),
        ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1}, "M*MM"),
        ("lfm2", {"full_attn_idxs": [1, 3]}, "C*C*"),
        ("lfm2", {}, "****"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*E"}, "M-*E"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}, "M-*E"),
    ],
)
def test_which_layers_have_which_mixer(family: str, config: dict[str, Any], kinds: str) -> None:
    sizes = {**SIZES, **LAYERS, **MAMBA, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    spec = load_spec(family, {**sizes, "moe_shared_expert_intermediate_size": 8, **config})
    assert "".join(LETTERS[type(layer.subs[0].op).__name__] for layer in spec.layers) == kinds


def test_sizes_of_a_state_space_are_given_or_computed() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1}
    (op,) = ops(load_spec("mamba", sizes))
    assert isinstance(op, Mamba1)
    assert (op.inner, op.state, op.dt_rank) == (128, 16, 4)
    # published files of falcon_mamba give an expansion that is not the model's
    (op,) = ops(load_spec("falcon_mamba", {**sizes, "expand": 16, "intermediate_size": 96, "time_step_rank": 7}))
    assert isinstance(op, Mamba1)
    assert (op.inner, op.dt_rank) == (96, 7)
    narrow = load_spec("nemotron_h", {**SIZES, **LAYERS, "hybrid_override_pattern": "M***", "attention_head_dim": 8})
    assert attentions(narrow)[0].head_dim == 8


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "qwen3_5_text"),
        ({"model_type": "qwen3_5_moe", "text_config": {}}, "qwen3_5_moe_text"),
    ],
)
def test_text_parts_of_files_with_vision(config: dict[str, Any], family: str) -> None:
    assert family_for(config) == family
