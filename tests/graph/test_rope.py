"""Rope tables against transformers' own frequencies, for every kind."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
import torch

from treadle.graph.layers import LayerReader
from treadle.graph.rope import rope_rows
from treadle.graph.spec import RopeTable, Scaling, SpecError

DIM, THETA, POSITIONS = 16, 4321.0, 64
LISTS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-betas": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-rough": {"factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "yarn-ratio": {"factor": None, "original_max_position_embeddings": 32},
    "longrope": {**LISTS, "original_max_position_embeddings": 32, "factor": 4.0},
    "longrope-ratio": {**LISTS, "original_max_position_embeddings": 32},
    "longrope-attention": {**LISTS, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


def reference(kind: str, options: dict[str, Any], length: int) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(
            hidden_size=4 * DIM,
            num_attention_heads=4,
            head_dim=DIM,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": kind, "rope_theta": THETA, **options},
        )
        if kind == "default":
            inverse, factor = 1.0 / THETA ** (torch.arange(0, DIM, 2).float() / DIM), 1.0
        else:
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = torch.arange(length).float()[:, None] * inverse[None]
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1)


def table_of(name: str, max_positions: int = POSITIONS) -> RopeTable:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in KINDS[name].items() if value}
    scaling = Scaling(rope_type=name.partition("-")[0], **given)  # type: ignore[arg-type]
    if KINDS[name].get("truncate") is False:
        scaling = msgspec.structs.replace(scaling, truncate=False)
    return RopeTable(dim=DIM, theta=THETA, max_positions=max_positions, scaling=scaling)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [20, 64, 100])
def test_tables_equal_transformers(name: str, length: int) -> None:
    made = rope_rows(table_of(name), length)
    assert (made.shape, made.dtype) == ((length, DIM), torch.float32)
    torch.testing.assert_close(made, reference(name.partition("-")[0], KINDS[name], length), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_short_table_holds_up_to_the_trained_length(name: str) -> None:
    table = table_of(name, max_positions=32)
    assert torch.equal(rope_rows(table, 10), rope_rows(table, 32)[:10])
    assert not torch.allclose(rope_rows(table, 33)[:10], rope_rows(table, 10))


def test_alpha_fixes_the_growth_of_dynamic_tables() -> None:
    table = RopeTable(dim=DIM, scaling=Scaling(rope_type="dynamic", alpha=1000.0))
    assert torch.equal(rope_rows(table, 10), rope_rows(table, 500)[:10])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (Scaling(rope_type="linear"), "linear rope needs factor"),
        (Scaling(rope_type="dynamic", factor=2.0), "dynamic rope needs max_positions"),
        (Scaling(rope_type="yarn", factor=2.0), "yarn rope needs original_max_position_embeddings"),
        (Scaling(rope_type="longrope", original_max_position_embeddings=8), "needs 8 short and long factors"),
    ],
)
def test_a_missing_value_is_named(scaling: Scaling, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rope_rows(RopeTable(dim=DIM, scaling=scaling), 4)


FACTORS = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}


def test_config_names_of_scaling_are_translated() -> None:
    values = {
        "layers": {"count": 1, "sub": {"a": {"op": "a"}}},
        "ops": {"a": {"op": "attention", "heads": 1, "head_dim": 8, "rope": "t"}},
        "rope": {"t": {"dim": 8, "max_positions": 8, "scaling": {"type": "su", "mrope_section": [1, 2], **FACTORS}}},
    }
    op = LayerReader(values, values).layers()[0].subs[0].op
    assert op.rope.scaling == Scaling(rope_type="longrope", **FACTORS)  # type: ignore[union-attr]
