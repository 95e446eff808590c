"""What the bodies of state-space mixers write; their logits are compared in test_family."""

from __future__ import annotations

from typing import Any

import pytest
from one_mixer import bound, graph_of, leaf, parts, written

from treadle.graph.spec import Mamba1, Mamba2, Norm
from treadle.graph.state import BlockPart
from treadle.graph.weights import Runs

MAMBA2: dict[str, Any] = {"heads": 4, "head_dim": 8, "state": 16, "groups": 2}


def test_x_b_and_c_are_scaled_by_one_vector_and_the_gate_may_stand_alone() -> None:
    scales = (0.5, 2.0, 3.0, 4.0, 0.25)
    graph = graph_of(Mamba2(in_scales=scales, in_scale=1.5, **MAMBA2), "bfloat16", (".conv.bias",))
    assert written(graph, "mix_in_scale") == "op.affine(h, 1.5, 0.0, 0.0)"
    assert bound(graph, "mix_scales") == Runs(((32, 2.0), (32, 3.0), (32, 4.0)), "bfloat16")
    assert written(graph, "mix_conv").startswith(
        "op.conv1d(mix_xbc_scaled, mix_conv_weight, mix_conv_bias, conv_state,"
    )
    assert written(graph, "mix_dt") == "op.time_step(mix_dt_scaled, mix_dt_bias, 0.0, 3.4e+38)"
    assert written(graph, "mix_gated") == "op.act_mul(mix_z_scaled, mix_out, 'silu')"
    assert parts(graph)[1] == BlockPart(kind="ssm", shape=(4, 8, 16), dtype="float32")


def test_a_gated_norm_in_groups_and_limits_of_steps() -> None:
    norm = Norm(eps=1e-5, groups=2, gate_first=True, cast="before")
    graph = graph_of(Mamba2(out_norm=norm, dt_limit=(0.1, float("inf")), **MAMBA2))
    assert written(graph, "mix_dt").endswith("0.1, 3.4e+38)")
    assert written(graph, "mix_out_norm") == (
        "op.gated_norm(mix_out, mix_z, mix_out_norm_weight, None, 'rms', 1e-05, False, 2, 'before', 'silu', True)"
    )
    assert "mix_scales" not in graph.calls[1].weights


def test_step_sizes_get_their_bias_in_float32() -> None:
    graph = graph_of(Mamba1(inner=32, state=8, dt_rank=4, inner_norm=Norm(weight=False)), "bfloat16")
    assert written(graph, "mix_dt_wide") == "op.linear(mix_dt_norm, mix_dt_weight, None)"
    assert bound(graph, "mix_dt_bias") == leaf("dt.bias", 32)
    assert written(graph, "mix_scan").startswith(
        "op.selective_scan(mix_conv, mix_dt, mix_rates, mix_b_norm, mix_c_norm,"
    )
    assert parts(graph) == [
        BlockPart(kind="conv", shape=(3, 32), dtype="bfloat16"),
        BlockPart(kind="ssm", shape=(32, 8), dtype="float32"),
    ]


def test_heads_must_share_groups_evenly() -> None:
    with pytest.raises(ValueError, match="heads 4 is not a multiple of groups 3"):
        Mamba2(**{**MAMBA2, "groups": 3})
