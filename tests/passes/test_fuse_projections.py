"""Before / Expected of FuseProjections; the numeric proof of every form is in test_pipeline."""

from toy import Toy, lines

from treadle.graph.weights import Concat, Leaf
from treadle.passes.fuse_projections import FuseProjections
from treadle.passes.quantize import Quantize


def test_q_k_v_and_gate_up_become_one_product_each() -> None:
    before = Toy(bias=True).graph()
    after = FuseProjections()(before)
    assert lines(before)[:3] == [
        "attn_q = op.linear(h, attn_q_weight, attn_q_bias)",
        "attn_k = op.linear(h, attn_k_weight, attn_k_bias)",
        "attn_v = op.linear(h, attn_v_weight, attn_v_bias)",
    ]
    joined = "attn_q_weight__attn_k_weight__attn_v_weight, attn_q_bias__attn_k_bias__attn_v_bias"
    assert lines(after)[:5] == [
        f"attn_q_attn_k_attn_v = op.linear(h, {joined})",
        "attn_q_attn_k_attn_v_parts = aten.split_with_sizes(attn_q_attn_k_attn_v, [64, 32, 32], -1)",
        "attn_q = attn_q_attn_k_attn_v_parts[0]",
        "attn_k = attn_q_attn_k_attn_v_parts[1]",
        "attn_v = attn_q_attn_k_attn_v_parts[2]",
    ]
    assert sum("op.linear" in line for line in lines(after)) == 4


def test_each_call_binds_the_weights_of_its_own_layer() -> None:
    after = FuseProjections()(Toy().graph())
    bound = [call.weights["mlp_gate_weight__mlp_up_weight"] for call in after.calls if call.layer is not None]
    assert bound == [
        Concat(tuple(Leaf(f"layers.{i}.mlp.{part}.weight", (96, 64), "float32") for part in ("gate", "up")), 0)
        for i in range(3)
    ]


def test_int8_weights_and_scales_are_joined_too() -> None:
    after = FuseProjections()(Quantize()(Toy().graph()))
    assert lines(after)[0].startswith(
        "attn_q_attn_k_attn_v = op.linear_int8(h, attn_q_weight_q__attn_k_weight_q__attn_v"
    )


def test_the_graph_given_is_not_changed() -> None:
    before = Toy().graph()
    text = lines(before)
    FuseProjections()(before)
    assert lines(before) == text
