"""What the body of a delta rule writes; its logits are compared in test_family."""

from __future__ import annotations

from typing import Any

import pytest
from one_mixer import bound, graph_of, leaf, parts, written

from treadle.graph.spec import Delta, Norm
from treadle.graph.state import BLOCK, BlockPart, Slot
from treadle.graph.weights import Concat, NegativeExp

GATED = Norm(gate_act="silu", eps=1e-5)
DELTA: dict[str, Any] = {"k_heads": 2, "v_heads": 4, "k_dim": 8, "v_dim": 16, "out_norm": GATED}


def test_queries_keys_and_values_are_one_product_and_one_convolution() -> None:
    graph = graph_of(Delta(decay="head", **DELTA))
    rows = {"q": 16, "k": 16, "v": 64}
    assert bound(graph, "mix_qkv_weight") == Concat(tuple(leaf(f"{n}.weight", c, 64) for n, c in rows.items()), 0)
    assert bound(graph, "mix_conv_weight") == Concat(tuple(leaf(f"{n}_conv.weight", c, 4) for n, c in rows.items()), 0)
    assert written(graph, "mix_conv").startswith("op.conv1d(mix_qkv, mix_conv_weight, None, conv_state, blocks,")
    assert written(graph, "mix_parts") == "aten.split_with_sizes(mix_conv, [16, 16, 64], -1)"
    assert parts(graph) == [
        BlockPart(kind="conv", shape=(3, 96), dtype="float32"),
        BlockPart(kind="delta", shape=(4, 8, 16), dtype="float32"),
    ]
    assert graph.calls[1].states == {"conv_state": Slot(BLOCK, 0), "delta_state": Slot(BLOCK, 1)}


def test_decays_and_rates_of_learning_are_float32() -> None:
    graph = graph_of(Delta(decay="head", beta_scale=2.0, **DELTA), "bfloat16")
    assert bound(graph, "mix_rates") == NegativeExp(leaf("A_log", 4))
    assert written(graph, "mix_decay") == "op.log_decay(mix_decay_in, mix_rates, mix_dt_bias, 0.0)"
    assert written(graph, "mix_beta_scaled") == "op.affine(mix_beta, 2.0, 0.0, 0.0)"
    assert written(graph, "mix_beta_wide") == "aten._to_copy(mix_beta_scaled, dtype=torch.float32)"
    assert written(graph, "mix_delta").endswith(f"kv_lens, {8**-0.5}, True)")
    assert [part.dtype for part in parts(graph)] == ["bfloat16", "float32"]


def test_a_decay_for_each_channel_through_narrow_matrices() -> None:
    graph = graph_of(Delta(decay="channel", decay_rank=True, gate_rank=True, decay_floor=-5.0, **DELTA))
    assert written(graph, "mix_decay_heads").endswith("[-1, 4, 8])")
    assert written(graph, "mix_decay") == "op.log_decay(mix_decay_heads, mix_rates, mix_dt_bias_heads, -5.0)"
    assert "mix_z_a" in written(graph, "mix_z_b")


def test_heads_must_share_keys_evenly() -> None:
    with pytest.raises(ValueError, match="v_heads 4 is not a multiple of k_heads 3"):
        Delta(decay="head", **{**DELTA, "k_heads": 3})
