"""Before / Expected of Quantize; how far it may move results is in test_prove."""

from toy import Toy, lines

from treadle.graph.spec import Moe
from treadle.graph.weights import Int8, Leaf
from treadle.passes.quantize import Quantize


def test_linear_layers_take_int8_weights_and_scales() -> None:
    before = Toy(bias=True).graph()
    after = Quantize()(before)
    assert "mlp_down = op.linear(mlp_act, mlp_down_weight, mlp_down_bias)" in lines(before)
    assert "mlp_down = op.linear_int8(mlp_act, mlp_down_weight_q, mlp_down_weight_s, mlp_down_bias, 32)" in lines(after)
    assert not any("op.linear(" in line for body in after.bodies for line in lines(after, body))


def test_logits_are_not_rounded_to_16_bits() -> None:
    after = Quantize()(Toy().graph("bfloat16"))
    head = lines(after, "head")
    assert head[1] == "rows_wide = aten._to_copy(rows, dtype=torch.float32)"
    assert head[2].startswith("head = op.linear_int8(rows_wide, head_weight_q")
    assert not any("_to_copy" in line for line in lines(after))


def test_a_tied_table_is_kept_once() -> None:
    after = Quantize()(Toy(tied=True).graph())
    table = Int8(Leaf("embed.weight", (96, 64), "float32"), 32, "weight")
    assert after.calls[0].weights["embed_weight_q"] == after.calls[-1].weights["head_weight_q"] == table
    assert "embed = op.embed_int8(token_ids, embed_weight_q, embed_weight_s, torch.float32, 32, 1.5)" in lines(
        after, "embed"
    )


def test_an_embedding_of_its_own_stays() -> None:
    after = Quantize()(Toy(tied=False).graph())
    assert "embed = op.embed(token_ids, embed_weight, 1.5)" in lines(after, "embed")


def test_experts_take_int8_stacks_and_routers_stay() -> None:
    before = Toy(moe=Moe(experts=4, top_k=2)).graph("bfloat16")
    after = lines(Quantize()(before))
    assert "mlp_router = op.linear(mlp_pre, mlp_router_weight, None)" in after
    call = next(line for line in after if line.startswith("mlp_experts ="))
    assert call.startswith(
        "mlp_experts = op.experts_int8(mlp_pre, mlp_weights, mlp_ids, mlp_experts_up_q, mlp_experts_up_s, None,"
        " mlp_experts_down_q, mlp_experts_down_s, None, 32, 'silu', True,"
    )
    assert lines(Quantize(experts=False)(before))[-3:] == lines(before)[-3:]
    assert any("op.linear_int8" in line for line in lines(Quantize(experts=False)(before)))


def test_groups_that_do_not_divide_are_left() -> None:
    before = Toy().graph()
    assert lines(Quantize(group=48)(before))[0] == lines(before)[0]
