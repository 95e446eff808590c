"""What layers keep is the same for the graph and for the memory plan, and lies where both say."""

from __future__ import annotations

from treadle.graph.expected import expected
from treadle.graph.family import load_spec
from treadle.graph.layer_state import state_of
from treadle.graph.state import BLOCK, Block, BlockPart, LayerKV, Slot, State, StateBuilder

CONFIG = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90, "sliding_window": 20,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}  # fmt: skip


def test_windows_have_a_group_of_their_own() -> None:
    spec = load_spec("gemma3_text", CONFIG)
    apart = state_of(spec, expected(spec), StateBuilder("bfloat16", 16))
    assert [(group.window, len(group.layers)) for group in apart.groups] == [(0, 1), (20, 5)]
    assert apart.needs_checkpoints


def test_the_first_token_that_a_query_sees() -> None:
    made = StateBuilder("float32", 4)
    layer = LayerKV(kv_heads=1, k_dim=8, v_dim=8)
    assert [made.append(layer, *reach) for reach in ((5, 0), (0, 8), (0, 0), (5, 0))] == [
        Slot(1, 0), Slot(2, 0), Slot(0, 0), Slot(1, 1),
    ]  # fmt: skip
    full, window, chunk = made.state().groups
    assert [full.first_needed(at) for at in (0, 9)] == [0, 0]
    assert [window.first_needed(at) for at in (0, 4, 5, 9)] == [0, 0, 1, 5]
    assert [chunk.first_needed(at) for at in (0, 7, 8, 17)] == [0, 0, 8, 16]


def test_parts_of_a_block_begin_at_whole_units() -> None:
    parts = (
        BlockPart(kind="conv", shape=(3, 10), dtype="bfloat16"),
        BlockPart(kind="delta", shape=(2, 8, 16), dtype="float32"),
    )
    block = Block(parts=parts)
    assert [part.nbytes for part in parts] == [256, 1024]
    assert [block.offset(index) for index in range(3)] == [0, 256, 1280]
    assert (block.block_bytes, block.block_units) == (1280, 5)
    bare = State(groups=(StateBuilder("float32", 16).state().full,), block=block)
    assert bare.full.page_bytes == 256, "a group without layers still counts tokens in pages"
    assert bare.scratch_bytes == 1280
    assert bare.offset(Slot(BLOCK, 1)) == 256
    assert bare.num_slots == 2
