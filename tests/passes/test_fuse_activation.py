"""Before / Expected of FuseActivation; the numeric proof of every form is in test_pipeline."""

from toy import Toy, lines

from treadle.passes.fuse_activation import FuseActivation
from treadle.passes.fuse_projections import FuseProjections
from treadle.passes.place_state import PlaceState


def test_activation_reads_the_joined_product() -> None:
    before = PlaceState()(FuseProjections()(Toy().graph()))
    after = FuseActivation()(before)
    assert "mlp_act = op.act_mul(mlp_gate, mlp_up, 'silu')" in lines(before)
    assert "mlp_act = op.gated_activation(mlp_gate_mlp_up, 'silu')" in lines(after)
    assert not any("mlp_gate_mlp_up_parts" in line for line in lines(after))


def test_separate_products_stay_as_they_are() -> None:
    before = PlaceState()(Toy().graph())
    assert lines(FuseActivation()(before)) == lines(before)
