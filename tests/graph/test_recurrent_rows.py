from toy import Toy

from treadle.graph.mixers import DecayAttention, Delta, Mamba1, Mamba2
from treadle.graph.recurrent_rows import chunk_tokens, delta_bytes, segment_slots, selective_bytes, ssm_bytes
from treadle.graph.spec import Layer, ModelSpec, Norm, Op, Sub
from treadle.graph.workspace import chunks_bytes, workspace_rows


def test_the_workspace_by_hand() -> None:
    assert (chunk_tokens(2), chunk_tokens(4)) == (64, 16)
    assert delta_bytes(640, 3, 32, 128, 64, False, 2) == 640 * 32 * (3 * 128 + 64 + 64) * 2 + (10 + 3) * 32 * 4
    assert delta_bytes(640, 3, 2, 8, 4, True, 4) == 640 * 2 * (3 * 8 + 4 + 16) * 4 + (40 + 3) * 2 * 8 * 4
    assert [segment_slots(tokens) for tokens in (0, 512, 513, 1024, 1025)] == [0, 0, 1, 1, 2]
    assert selective_bytes(1025, 8192, 16) == 2 * 8192 * 17 * 4
    assert ssm_bytes(1025, 128, 64, 128) == 2 * 128 * (64 * 128 + 1) * 4


def with_op(op: Op) -> ModelSpec:
    plain = Toy(windows=(0,)).spec()
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    return ModelSpec(**{**values, "layers": (Layer(index=0, subs=(Sub(name="mix", pre=Norm(), op=op),)),)})


def test_a_plan_for_a_gpu_counts_it() -> None:
    delta = with_op(Delta(decay="head", k_heads=2, v_heads=4, k_dim=16, v_dim=8, out_norm=Norm()))
    expected = delta_bytes(4096, 9, 4, 16, 8, False, 2)
    assert chunks_bytes(delta, 4096, 9, 2) == expected
    rows = workspace_rows(delta, "bfloat16", "none", "cuda", 9, 4096)
    assert [row.nbytes for row in rows if row.item == "states over 4096 tokens"] == [expected]
    mamba = with_op(Mamba1(inner=32, state=8, dt_rank=4))
    assert chunks_bytes(mamba, 4096, 9, 4) == selective_bytes(4096, 32, 8)
    mamba = with_op(Mamba2(heads=4, head_dim=8, state=16, groups=2))
    assert chunks_bytes(mamba, 4096, 9, 4) == ssm_bytes(4096, 4, 8, 16)
    decay = with_op(DecayAttention(heads=4, head_dim=8, out_norm=Norm()))
    assert chunks_bytes(decay, 4096, 9, 4) == ssm_bytes(4096, 4, 8, 8)
    assert chunks_bytes(Toy().spec(), 4096, 9, 2) == 0
