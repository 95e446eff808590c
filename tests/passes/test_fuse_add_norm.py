"""Before / Expected of FuseAddNorm; the numeric proof of every form is in test_pipeline."""

from toy import Toy, lines

from treadle.passes.fuse_add_norm import FuseAddNorm
from treadle.passes.place_state import PlaceState


def test_both_residual_adds_join_the_norm_that_follows() -> None:
    before = PlaceState()(Toy().graph())
    after = FuseAddNorm()(before)
    assert lines(before)[-2:] == [
        "mlp_residual = op.add(attn_residual, mlp_down, 1.0, 1.0)",
        "next_norm = op.norm(mlp_residual, next_norm_weight, None, 'rms', 1e-05, False, 1, 'after')",
    ]
    arguments = "attn_residual, mlp_down, next_norm_weight, None, 1.0, 1.0, 'rms', 1e-05, False, 1, 'after'"
    assert lines(after)[-3:] == [
        f"mlp_residual_norm = op.add_norm({arguments})",
        "mlp_residual = mlp_residual_norm[0]",
        "next_norm = mlp_residual_norm[1]",
    ]
    assert not any("op.add(" in line or "op.norm(" in line for line in lines(after))


def test_a_norm_of_something_else_stays() -> None:
    after = FuseAddNorm()(PlaceState()(Toy(post=True).graph()))
    assert "attn_post = op.norm(attn_o, attn_post_weight, None, 'rms', 1e-05, False, 1, 'after')" in lines(after)
