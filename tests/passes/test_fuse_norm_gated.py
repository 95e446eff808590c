"""Before / Expected of FuseNormGated; the numeric proof of every form is in test_pipeline."""

from toy import VOCAB, Toy, lines, load

from treadle.graph.ir import Graph
from treadle.passes.fuse_activation import FuseActivation
from treadle.passes.fuse_norm_gated import FuseNormGated
from treadle.passes.fuse_projections import FuseProjections
from treadle.passes.place_state import PlaceState
from treadle.passes.prove import evaluate, row_error
from treadle.passes.sample import draw


def gated(toy: Toy) -> Graph:
    return FuseActivation()(PlaceState()(FuseProjections()(toy.graph())))


def test_norm_product_and_activation_become_one() -> None:
    before = gated(Toy(bias=True))
    after = FuseNormGated()(before)
    assert "mlp_act = op.gated_activation(mlp_gate_mlp_up, 'silu')" in lines(before)
    arguments = "attn_residual, mlp_pre_weight, None, 'rms', 1e-05, False, 1, 'after'"
    weights = "mlp_gate_weight__mlp_up_weight, mlp_gate_bias__mlp_up_bias, 'silu'"
    assert f"mlp_act = op.norm_gated_linear({arguments}, {weights})" in lines(after)
    assert not any(line.startswith(("mlp_pre =", "mlp_gate_mlp_up =")) for line in lines(after))
    sample = draw(before, VOCAB)
    assert row_error(*(evaluate(graph, load, sample) for graph in (before, after))) < 1e-6


def test_a_norm_that_others_read_stays() -> None:
    before = gated(Toy())
    body = before.bodies["layer0"]
    norm = next(node for node in body.ops if node.name == "mlp_pre")
    residual = next(node for node in body.ops if node.name == "mlp_residual")
    residual.args = (norm, *residual.args[1:])
    assert lines(FuseNormGated()(before)) == lines(before)


def test_separate_products_stay_as_they_are() -> None:
    before = PlaceState()(Toy().graph())
    assert lines(FuseNormGated()(before)) == lines(before)
