"""Memory plans of the shape of Llama-3.1-8B, for tests to vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.graph.checkpoint import Checkpoint, WeightInfo
from treadle.graph.family import family_for, load_spec
from treadle.graph.memory import MemoryPlan, Workload, plan_memory
from treadle.graph.source import DummySource
from treadle.graph.spec import ModelSpec

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
GIB = 1 << 30


def described(config: dict[str, Any]) -> tuple[ModelSpec, dict[str, WeightInfo]]:
    spec = load_spec(family_for(config), config)
    return spec, dict(Checkpoint(DummySource(config), spec).weights)


SPEC, WEIGHTS = described(LLAMA_8B)
WORK = Workload(dtype="bfloat16", max_num_seqs=32, max_len=4096, max_step_tokens=512, memory_bytes=24 * GIB)


def plan(**changes: Any) -> MemoryPlan:
    return plan_memory(SPEC, WEIGHTS, replace(WORK, **changes))
