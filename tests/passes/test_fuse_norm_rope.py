"""Before / Expected of FuseNormRope, and its numeric proof."""

import pytest
from toy import VOCAB, Toy, lines, load

from treadle.conf.schema import PassesConfig
from treadle.graph.ir import Graph
from treadle.graph.spec import Norm, QKNorm
from treadle.graph.target import Target
from treadle.passes.fuse_norm_rope import FuseNormRope
from treadle.passes.fuse_projections import FuseProjections
from treadle.passes.fuse_rope_cache import FuseRopeCache
from treadle.passes.pipeline import pipeline
from treadle.passes.place_state import PlaceState
from treadle.passes.prove import Prover
from treadle.passes.runner import run_passes


def before(toy: Toy, dtype: str = "float32") -> Graph:
    return FuseRopeCache()(PlaceState()(toy.graph(dtype)))


def test_norms_of_heads_join_rope_and_cache_write() -> None:
    graph = before(Toy(qk_norm=QKNorm(eps=1e-5)))
    state = "arena, page_table, seq_ids, positions, kv_offset, 4, 'half', 'head'"
    assert [line for line in lines(graph) if "op.norm" in line or "cache_write" in line][:3] == [
        "attn_q_norm = op.norm(attn_q_heads, attn_q_norm_weight, None, 'rms', 1e-05, False, 1, 'after')",
        "attn_k_norm = op.norm(attn_k_heads, attn_k_norm_weight, None, 'rms', 1e-05, False, 1, 'after')",
        f"attn_q_rope = op.rope_cache_write(attn_q_norm, attn_k_norm, attn_v_heads, rope_table, {state})",
    ]
    weights = "attn_q_norm_weight, attn_k_norm_weight, rope_table"
    assert [line for line in lines(FuseNormRope()(graph)) if "_q_norm" in line or "cache_write" in line] == [
        f"attn_q_rope = op.norm_rope_cache_write(attn_q_heads, attn_k_heads, attn_v_heads, {weights}, {state},"
        " 'rms', 1e-05, False, 'after')"
    ]


@pytest.mark.parametrize("norm", [None, QKNorm(scope="full"), QKNorm(after_rope=True)])
def test_other_norms_stay(norm: QKNorm | None) -> None:
    graph = before(Toy(qk_norm=norm))
    assert lines(FuseNormRope()(graph)) == lines(graph)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", [QKNorm(eps=1e-5), QKNorm(kind="l2", plus_one=True, cast="before")])
def test_it_is_proved(dtype: str, norm: QKNorm) -> None:
    prover = Prover(load, VOCAB)
    passes = (FuseProjections(), PlaceState(), FuseRopeCache(), FuseNormRope())
    after = run_passes(passes, Toy(qk_norm=norm, windows=(5, 0), norm=Norm(eps=1e-5)).graph(dtype), [prover])
    assert [proof.applied for proof in prover.proofs] == list(passes)
    assert any("norm_rope_cache_write" in line for line in lines(after))


def test_it_runs_where_a_kernel_does_all_of_it() -> None:
    config = PassesConfig(compile=False)
    here, there = (
        [each.name for each in pipeline(config, Target(device=device, dtype="bfloat16"))] for device in ("cpu", "cuda")
    )
    assert set(there) - set(here) == {"fuse_norm_rope"}
    off = pipeline(PassesConfig(compile=False, fuse_norm_rope=False), Target(device="cuda", dtype="bfloat16"))
    assert "fuse_norm_rope" not in [each.name for each in off]
