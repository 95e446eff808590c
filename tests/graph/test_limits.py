"""Values of config.json that no model has are refused before anything is made of them, whatever else it says."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import CONFIG, write_model

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.schema import Deployment
from treadle.graph.family import known_families
from treadle.graph.layers import MAX_LAYERS
from treadle.graph.resolve import Resolved, resolve

WRONG: tuple[Any, ...] = (
    -1, 0, 1, 3, 1 << 20, 1 << 31, 1 << 63, 1 << 70, 0.0, -0.5, 1e-300, 1e39, float("nan"), float("inf"), True, "x", "",
    [], [1], ["x"], {}, {"x": 1},
)  # fmt: skip

MORE = {"sliding_window": 4, "max_window_layers": 1, "eos_token_id": 2}
KEYS = (
    *CONFIG, *MORE, "layer_types", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq",
    "attention_bias", "hidden_activation", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern",
)  # fmt: skip


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    return compose(["model=hf", f"model.path='{folder}'", "hardware=cpu", "hardware.memory=8GiB"])


def resolved(deployment: Deployment, **config: Any) -> Resolved:
    """Return what comes of a checkpoint with other values in its config.json."""
    assert deployment.model.path is not None
    (Path(deployment.model.path) / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return resolve(deployment)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"num_hidden_layers": 2**31}, ["layers.count=2147483648", "1 to 1024", "num_hidden_layers"]),
        ({"num_hidden_layers": 1_000_000}, ["layers.count=1000000", "num_hidden_layers"]),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 2**31},
            ["config.dense_layers", "a range of more than 65536"],
        ),
        ({"num_hidden_layers": 0}, ["layers.count=0", "num_hidden_layers"]),
        ({"intermediate_size": -1}, ["ops.mlp.intermediate=-1", ">= 0", "intermediate_size"]),
        ({"vocab_size": -1}, ["sizes.vocab=-1", ">= 1", "vocab_size"]),
        ({"hidden_size": -1}, ["sizes.hidden=-1", "hidden_size"]),
        ({"head_dim": 0}, ["ops.attn.head_dim=0", ">= 1", "head_dim"]),
        ({"num_attention_heads": 0}, ["ops.attn.heads=0", ">= 1", "num_attention_heads"]),
        ({"rms_norm_eps": -1}, ["norm", "eps=-1", "> 0", "rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["eps=nan", "rms_norm_eps"]),
        ({"rope_theta": 0}, ["theta=0", "> 0", "rope_theta"]),
        ({"rope_theta": -5.0}, ["theta=-5.0", "rope_theta"]),
        ({"partial_rotary_factor": 2.0}, ["rope turns 16 channels of 8"]),
        ({"model_type": "mistral", "sliding_window": -1}, ["ops.attn.window=-1", ">= 0", "sliding_window"]),
        ({"eos_token_id": -1}, ["eos_token_id=-1", ">= 0"]),
        ({"eos_token_id": [2, -1]}, ["eos_token_id[1]=-1", ">= 0"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id=</s>"]),
        ({"max_position_embeddings": 2**63}, ["sizes.max_positions=9223372036854775808", "<= 2147483647"]),
        ({"max_position_embeddings": -1}, ["sizes.max_positions=-1", "max_position_embeddings"]),
        ({"hidden_act": "nope"}, ["ops.mlp.act=nope", "silu", "hidden_act"]),
        ({"hidden_act": "gelu_newt"}, ["did you mean gelu_new?"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["scaling.factor=0", "> 0"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear rope needs factor"]),
        ({"rope_scaling": {"rope_type": "lineer", "factor": 2}}, ["did you mean linear?"]),
        ({"rope_scaling": "linear"}, ["rope.main.scaling=linear", "map"]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, ["period=0"]),
        ({"model_type": "gemma2", "layer_types": [1, 2]}, ["layers.kinds[0]=1"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(
    deployment: Deployment, config: dict[str, Any], parts: list[str]
) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolved(deployment, **config)
    assert time.monotonic() - begin < 3
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400, message
    for part in parts:
        assert part in message, message


@settings(deadline=3000, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(family=st.sampled_from(known_families()), key=st.sampled_from(KEYS), value=st.sampled_from(WRONG))
def test_no_value_of_any_key_gives_anything_but_a_plan_or_a_refusal(
    deployment: Deployment, family: str, key: str, value: Any
) -> None:
    with suppress(ConfigError):
        made = resolved(deployment, **{**MORE, "model_type": family, key: value})
        assert all(row.nbytes >= 0 for row in made.plan.rows)


def test_as_many_layers_as_are_possible_are_described_quickly(deployment: Deployment) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="weights that no tensor gives"):
        resolved(deployment, num_hidden_layers=MAX_LAYERS)
    assert time.monotonic() - begin < 3
