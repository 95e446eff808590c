"""Memory inside a step of mixers with a state of fixed size, by hand."""

from __future__ import annotations

import pytest

from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import family_for, load_spec
from treadle.graph.memory import Workload, plan_memory
from treadle.graph.recurrent_width import recurrent_width
from treadle.graph.source import DummySource
from treadle.graph.spec import Delta, Mamba1, Mamba2, Mlp, Norm, ShortConv

DELTA = Delta(decay="head", k_heads=16, v_heads=32, k_dim=128, v_dim=128, out_norm=Norm())
MAMBA1 = Mamba1(inner=8192, state=16, dt_rank=256)


def test_the_delta_rule_by_hand() -> None:
    convolved, values = 2 * 16 * 128 + 32 * 128, 32 * 128
    assert recurrent_width(DELTA, 2048, 2) == 2 * convolved + 32 * 3 + 32 * 4 + 3 * values
    by_channel = recurrent_width(Delta(**{**fields(DELTA), "decay": "channel"}), 2048, 2)
    assert by_channel - recurrent_width(DELTA, 2048, 2) == 3 * 32 * 127


def fields(op: Delta) -> dict[str, object]:
    return {name: getattr(op, name) for name in op.__struct_fields__}


def test_scans_by_hand() -> None:
    mamba2 = Mamba2(heads=64, head_dim=64, state=128, groups=8)
    convolved = 64 * 64 + 2 * 8 * 128
    assert recurrent_width(mamba2, 4096, 2) == 2 * convolved + 64 * 3 + 3 * 4096
    assert recurrent_width(mamba2, 4096, 4) == 2 * convolved + 64 * 2 + 3 * 4096
    assert recurrent_width(MAMBA1, 4096, 2) == 8 * 8192 + 2 * (256 + 32)


def test_other_ops_have_none() -> None:
    mlp = Mlp(act="silu", intermediate=512)
    assert recurrent_width(mlp, 256, 2) == 0
    assert recurrent_width(ShortConv(kernel=3), 256, 2) == 6 * 256


CONFIG = {
    "model_type": "qwen3_next",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "partial_rotary_factor": 0.25,
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_has_blocks_and_their_workspace(device: str) -> None:
    spec = load_spec(family_for(CONFIG), CONFIG)
    work = Workload(
        dtype="bfloat16", max_num_seqs=8, max_len=2048, max_step_tokens=512, memory_bytes=4 << 30, device=device
    )
    made = plan_memory(spec, dict(Checkpoint(DummySource(CONFIG), spec).weights), work)
    rows = {row.item: row.nbytes for row in made.rows}
    part, conv = 8 * 64 * 64 * 4, (2 * 4 * 64 + 8 * 64) * 3 * 2
    assert [(kind.name, kind.item_bytes) for kind in made.kinds] == [
        ("kv", 2 * 2 * 64 * 2 * 16),
        ("block", 3 * (part + conv)),
    ]
    assert made.checkpoint_bytes == made.arena_bytes - made.state.scratch_bytes
    assert ("states over 512 tokens" in rows) == (device == "cuda")
    assert made.full_sequences == 8
