"""Before / Expected of PlaceState; the numeric proof of every form is in test_pipeline."""

from toy import Toy, lines

from treadle.graph.ir import Level, Role, role
from treadle.graph.weights import Ints
from treadle.passes.place_state import PlaceState


def test_attention_writes_and_reads_pages() -> None:
    before = Toy(windows=(5, 0)).graph()
    after = PlaceState()(before)
    steps = "seq_ids, positions, q_starts, kv_lens"
    dense = f"attn_q_rope, attn_k_rope, attn_v_heads, kv, {steps}, None, 0.25, 5, 0.0, 0, None"
    assert f"attn_attention = op.attention({dense})" in lines(before)
    write = "op.cache_write(attn_k_rope, attn_v_heads, arena, page_table, seq_ids, positions, kv_offset, 4)"
    paged = "attn_q_rope, arena, page_table, q_starts, kv_lens, kv_offset, None, 4, 2, 16, 0.25, 5, 0.0, 0, None"
    at = lines(after).index(write)
    assert lines(after)[at + 1] == f"attn_attention = op.paged_attention({paged})"
    assert after.level is Level.SHARDED
    assert not any(role(node) is Role.STATE for body in after.bodies.values() for node in body.placeholders)


def test_every_layer_knows_its_place_in_a_page() -> None:
    graph = PlaceState()(Toy().graph())
    layer_bytes = 2 * 2 * 16 * 4 * 4  # k and v, heads, dim, fp32, tokens of a page
    offsets = [call.weights["kv_offset"] for call in graph.calls if call.layer is not None]
    assert offsets == [Ints((i * layer_bytes,)) for i in range(3)]
