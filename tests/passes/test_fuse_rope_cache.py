"""Before / Expected of FuseRopeCache; the numeric proof of every form is in test_pipeline."""

from toy import Toy, lines

from treadle.graph.spec import QKNorm
from treadle.passes.fuse_rope_cache import FuseRopeCache
from treadle.passes.place_state import PlaceState


def test_rope_and_cache_write_become_one_op() -> None:
    before = PlaceState()(Toy().graph())
    after = FuseRopeCache()(before)
    assert [line for line in lines(before) if "op.rope" in line or "cache_write" in line] == [
        "attn_q_rope = op.rope(attn_q_heads, positions, rope_table, 'half', 'head')",
        "attn_k_rope = op.rope(attn_k_heads, positions, rope_table, 'half', 'head')",
        "op.cache_write(attn_k_rope, attn_v_heads, arena, page_table, seq_ids, positions, kv_offset, 4)",
    ]
    state = "arena, page_table, seq_ids, positions, kv_offset, 4, 'half', 'head'"
    assert [line for line in lines(after) if "op.rope" in line or "cache_write" in line] == [
        f"attn_q_rope = op.rope_cache_write(attn_q_heads, attn_k_heads, attn_v_heads, rope_table, {state})"
    ]


def test_a_norm_between_rope_and_cache_keeps_them_apart() -> None:
    after = FuseRopeCache()(PlaceState()(Toy(qk_norm=QKNorm(after_rope=True)).graph()))
    assert any("op.cache_write" in line for line in lines(after))
    assert not any("op.rope_cache_write" in line for line in lines(after))
