"""Projections, convolutions and gated norms that several bodies write alike."""

from __future__ import annotations

import pytest
from one_mixer import bound, graph_of, leaf, written

from treadle.graph.spec import Mamba2, Norm, SpecError


def test_biases_are_joined_as_weights_are() -> None:
    graph = graph_of(Mamba2(heads=4, head_dim=8, state=16, groups=2), biases=(".conv.bias", ".xbc.bias"))
    assert bound(graph, "mix_xbc_bias") == leaf("xbc.bias", 96)
    assert bound(graph, "mix_conv_bias") == leaf("conv.bias", 96)
    assert written(graph, "mix_xbc") == "op.linear(h, mix_xbc_weight, mix_xbc_bias)"
    assert written(graph, "mix_dt_in") == "op.linear(h, mix_dt_in_weight, None)"


def test_a_gate_is_silu_unless_the_norm_says_otherwise() -> None:
    for norm, act in ((Norm(), "silu"), (Norm(gate_act="sigmoid"), "sigmoid")):
        graph = graph_of(Mamba2(heads=4, head_dim=8, state=16, groups=2, out_norm=norm))
        assert written(graph, "mix_out_norm").endswith(f"'after', '{act}', False)")


def test_a_gate_that_has_no_op_is_refused() -> None:
    norm = Norm(low_rank_gate=True)
    with pytest.raises(SpecError, match=r"layers\.0\.mix\.out_norm: low_rank_gate = True has no kernels yet"):
        graph_of(Mamba2(heads=4, head_dim=8, state=16, groups=2, out_norm=norm))
