"""What the bodies of delta rules, state spaces and short convolutions write; test_family compares their logits."""

from __future__ import annotations

from typing import Any

import pytest
from toy import Shape, Toy, lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.ir import Graph
from treadle.graph.spec import Delta, Layer, Mamba1, Mamba2, ModelSpec, Norm, Op, ShortConv, SpecError, Sub
from treadle.graph.state import BLOCK, BlockPart, Slot
from treadle.graph.weights import Concat, Leaf, NegativeExp, Runs

GATED = Norm(gate_act="silu", eps=1e-5)
DELTA: dict[str, Any] = {"k_heads": 2, "v_heads": 4, "k_dim": 8, "v_dim": 16, "out_norm": GATED}
MAMBA2: dict[str, Any] = {"heads": 4, "head_dim": 8, "state": 16, "groups": 2}


def graph_of(op: Op, dtype: str = "float32", biases: tuple[str, ...] = ()) -> Graph:
    plain = Toy(windows=(0,)).spec()
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    sub = Sub(name="mix", pre=Norm(eps=1e-5), op=op)
    spec = ModelSpec(**{**values, "layers": (Layer(index=0, subs=(sub,)),)})
    tensors = {
        name: Shape(tuple(size if size > 0 else 8 for size in item.shape))
        for name, item in expected(spec).items()
        if item.required or name.endswith(biases or ("?",))
    }
    return build(spec, tensors, BuildOptions(dtype=dtype, max_len=8, page_tokens=4))


def written(graph: Graph, name: str) -> str:
    (line,) = [line for line in lines(graph) if line.startswith(f"{name} = ")]
    return line.partition(" = ")[2]


def parts(graph: Graph) -> list[BlockPart]:
    assert graph.state.block is not None
    return list(graph.state.block.parts)


def bound(graph: Graph, name: str) -> object:
    return graph.calls[1].weights[name]


def leaf(name: str, *shape: int, dtype: str = "float32") -> Leaf:
    return Leaf(f"layers.0.mix.{name}", shape, dtype)


def test_queries_keys_and_values_are_one_product_and_one_convolution() -> None:
    graph = graph_of(Delta(decay="head", **DELTA))
    rows = {"q": 16, "k": 16, "v": 64}
    assert bound(graph, "mix_qkv_weight") == Concat(tuple(leaf(f"{n}.weight", c, 64) for n, c in rows.items()), 0)
    assert bound(graph, "mix_conv_weight") == Concat(tuple(leaf(f"{n}_conv.weight", c, 4) for n, c in rows.items()), 0)
    assert written(graph, "mix_conv").startswith("op.conv1d(mix_qkv, mix_conv_weight, None, conv_state, blocks,")
    assert written(graph, "mix_parts") == "aten.split_with_sizes(mix_conv, [16, 16, 64], -1)"
    assert parts(graph) == [
        BlockPart(kind="conv", shape=(96, 3), dtype="float32"),
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
        BlockPart(kind="conv", shape=(32, 3), dtype="bfloat16"),
        BlockPart(kind="ssm", shape=(32, 8), dtype="float32"),
    ]


def test_a_short_convolution_between_two_gates() -> None:
    graph = graph_of(ShortConv(kernel=3))
    assert written(graph, "mix_in") == "op.multiply(mix_b, mix_x)"
    assert written(graph, "mix_conv").startswith("op.conv1d(mix_in, mix_conv_weight, None, conv_state,")
    assert written(graph, "mix_out") == "op.multiply(mix_c, mix_conv)"
    assert parts(graph) == [BlockPart(kind="conv", shape=(64, 2), dtype="float32")]


def test_sizes_that_do_not_divide_and_gates_that_have_no_op() -> None:
    with pytest.raises(ValueError, match="v_heads 4 is not a multiple of k_heads 3"):
        Delta(decay="head", **{**DELTA, "k_heads": 3})
    with pytest.raises(ValueError, match="heads 4 is not a multiple of groups 3"):
        Mamba2(**{**MAMBA2, "groups": 3})
    with pytest.raises(SpecError, match=r"layers\.0\.mix\.out_norm: low_rank_gate = True has no kernels yet"):
        graph_of(Delta(decay="head", **{**DELTA, "out_norm": Norm(low_rank_gate=True)}))
