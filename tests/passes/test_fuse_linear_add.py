"""Before / Expected of FuseLinearAdd; the numeric proof of every form is in test_pipeline."""

import torch
from toy import VOCAB, Toy, lines, load

from treadle.passes.fuse_linear_add import FuseLinearAdd
from treadle.passes.place_state import PlaceState
from treadle.passes.prove import evaluate, row_error
from treadle.passes.sample import draw


def test_products_add_themselves_to_the_residual_stream() -> None:
    before = PlaceState()(Toy(bias=True).graph())
    after = FuseLinearAdd()(before)
    assert "attn_o = op.linear(attn_out, attn_o_weight, attn_o_bias)" in lines(before)
    assert "attn_residual = op.add(x, attn_o, 1.0, 1.0)" in lines(before)
    assert "attn_residual = op.linear_add(attn_out, attn_o_weight, attn_o_bias, x, 1.0, 1.0)" in lines(after)
    assert "mlp_residual = op.linear_add(mlp_act, mlp_down_weight, mlp_down_bias, attn_residual, 1.0, 1.0)" in lines(
        after
    )
    assert not any("op.add(" in line for line in lines(after))


def test_a_norm_in_between_keeps_them_apart() -> None:
    before = PlaceState()(Toy(post=True).graph())
    assert lines(FuseLinearAdd()(before)) == lines(before)


def test_a_product_with_another_reader_stays() -> None:
    before = PlaceState()(Toy().graph())
    body = before.bodies["layer0"]
    add = next(node for node in body.ops if node.name == "mlp_residual")
    # as if the product itself were the sum's other part as well
    add.args = (add.args[1], add.args[1], 1.0, 1.0)
    assert "mlp_residual = op.add(mlp_down, mlp_down, 1.0, 1.0)" in lines(FuseLinearAdd()(before))


def test_the_product_may_come_first_and_keeps_its_weight() -> None:
    before = PlaceState()(Toy().graph())
    for body in before.bodies.values():
        for node in body.ops:
            if node.name == "mlp_residual":
                node.args = (node.args[1], node.args[0], 0.5, 2.0)
    after = FuseLinearAdd()(before)
    assert "mlp_residual = op.linear_add(mlp_act, mlp_down_weight, None, attn_residual, 2.0, 0.5)" in lines(after)
    sample = draw(before, VOCAB)
    exact, got = (evaluate(graph, load, sample) for graph in (before, after))
    assert row_error(exact, got) < 1e-6
    assert torch.isfinite(exact).all()
