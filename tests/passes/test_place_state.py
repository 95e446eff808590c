"""Before / Expected of PlaceState; the numeric proof of every form is in test_pipeline."""

from one_layer import spec_of
from oracle import tiny
from oracle_graph import graph_of
from toy import Toy, lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.ir import Graph, Level, Role, role
from treadle.graph.spec import Index, Mla, RopeTable
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


def sparse() -> Graph:
    index = Index(kind="dsa", heads=2, dim=8, topk=3)
    op = Mla(heads=4, kv_lora=16, rope_dim=8, nope=12, v_dim=20, rope=RopeTable(dim=8), index=index)
    spec = spec_of(op)
    wanted = {name: item for name, item in expected(spec).items() if item.required}
    return build(spec, wanted, BuildOptions(dtype="float32", max_len=64, page_tokens=4))


def test_latents_and_the_keys_that_choose_among_them_have_slots_of_their_own() -> None:
    before = sparse()
    after = PlaceState()(before)
    found = lines(after)
    where = "arena, page_table, q_starts, kv_lens"
    stored = "arena, page_table, seq_ids, positions"
    write = found.index(f"op.latent_write(attn_index_k, {stored}, attn_keys_offset, 4)")
    choice = f"op.paged_index_select(attn_index_q_heads, attn_index_weights, {where}, attn_keys_offset, 4, 3)"
    assert found[write + 1] == f"attn_index = {choice}"
    write = found.index(f"op.latent_write(attn_k, {stored}, attn_latent_offset, 4)")
    scale = 20**-0.5
    rest = f"attn_latent_offset, None, 4, {scale}, 16, 0, attn_index"
    assert found[write + 1] == f"attn_attention = op.paged_latent_attention(attn_q_absorbed, {where}, {rest})"
    call = next(call for call in after.calls if call.layer == 0)
    assert [call.weights[f"attn_{name}_offset"] for name in ("latent", "keys")] == [
        Ints((0,)),
        Ints((4 * 24 * 4 + 128,)),
    ]
    kept = [(layer.kind, layer.k_dim, layer.v_dim) for layer in before.state.full.layers]
    assert kept == [("latent", 24, 0), ("index", 8, 0)]


def everything(graph: Graph) -> list[str]:
    return [line for body in graph.bodies for line in lines(graph, body)]


def test_shared_keys_are_read_where_another_layer_stored_them() -> None:
    _, before = graph_of(tiny("gemma4-shared"))
    after = PlaceState()(before)
    stored = sum("op.cache_write(" in line for line in everything(after))
    assert stored == sum("op.attention(" in line for line in everything(before)) > 0
    offsets = {call.layer: call.weights["kv_offset"] for call in after.calls if call.layer is not None}
    assert offsets[3] == offsets[4] == offsets[1]
    assert offsets[5] == offsets[2] != offsets[1]


def test_rows_of_compressed_attention_are_stored_like_latents() -> None:
    _, before = graph_of(tiny("deepseek-v4"))
    text = everything(PlaceState()(before))
    placed = [line for line in text if "op.paged_compressed_attention(" in line]
    assert len(placed) == 2
    assert all("arena, page_table, q_starts, kv_lens, rows_offset, 4," in line for line in placed)
    assert sum("op.latent_write(" in line for line in text) == 3
