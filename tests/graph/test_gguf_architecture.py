"""Each architecture's names and keys, against what transformers saves of a tiny model: no family is needed for that."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle_case import sizes
from tiny_gguf import stacked, write

from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import family_for, load_spec
from treadle.graph.gguf_architecture import ARCHITECTURES, KEYS_OF_ALL, WITH_EXPERTS, architecture
from treadle.graph.source import open_source

MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2moe", {**MOE, "shared_expert_intermediate_size": 48, "head_dim": None}),
    "qwen3_moe": ("qwen3moe", {**MOE, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": None}),
    "gpt_oss": ("gpt-oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "phi3": ("phi3", {"head_dim": None, "sliding_window": None}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "smollm3": ("smollm3", {"head_dim": None}),
    "arcee": ("arcee", {"head_dim": None}),
    "granite": (
        "granite",
        {
            "head_dim": None,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
}


def saved(model_type: str, options: dict[str, Any], path: Path) -> Any:
    """Save a tiny model with random weights as transformers does."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = {key: value for key, value in {**sizes(), **options}.items() if key != "head_dim" or value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[model_type](**chosen)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(path)
    return SimpleNamespace(path=path, config=json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("model_type", MODELS)
def test_names_and_keys_are_those_of_the_hub(model_type: str, tmp_path: Path) -> None:
    name, options = MODELS[model_type]
    model = saved(model_type, options, tmp_path / "hub")
    file, original = open_source(write(model, tmp_path / "m.gguf", name)), open_source(model.path)
    expected = {name: original.read(name) for name in original.tensors}
    if model_type == "gpt_oss":
        expected = stacked(expected)
    assert set(file.tensors) == set(expected)
    for tensor, value in expected.items():
        assert file.tensors[tensor].shape == tuple(value.shape), tensor
        assert torch.equal(file.read(tensor), value), tensor
    row = architecture(file.metadata)
    assert row is not None
    assert file.config["model_type"] == model_type
    wanted = {**KEYS_OF_ALL, **row.required, **row.optional, **row.constants, **options}
    for key in wanted:
        if key in model.config and not (key == "head_dim" and model.config[key] is None):
            made, meant = file.config[key], model.config[key]
            assert made == pytest.approx(meant) if isinstance(meant, float) else made == meant, key
    a, b = (Checkpoint(source, load_spec(model_type, source.config)) for source in (file, original))
    assert set(a.weights) == set(b.weights)
    for weight in b.weights:
        assert torch.equal(a.read(weight), b.read(weight)), weight


def test_phi3_has_a_divisor_for_every_channel(tmp_path: Path) -> None:
    import gguf

    model = saved("phi3", MODELS["phi3"][1], tmp_path / "hub")
    path = write(model, tmp_path / "m.gguf", "phi3")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "phi3")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors(1.25)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for kind, first in (("long", 2.0), ("short", 1.0)):
        writer.add_tensor(f"rope_factors_{kind}.weight", torch.arange(first, first + 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = open_source(tmp_path / "n.gguf").config
    scaling = config["rope_scaling"]
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.25)
    assert (scaling["short_factor"][0], scaling["long_factor"]) == (1.0, [2.0 + i for i in range(8)])
    assert config["original_max_position_embeddings"] == scaling["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("row", [*ARCHITECTURES.values(), *WITH_EXPERTS.values()], ids=lambda row: row.model_type)
def test_a_row_names_a_family_that_reads_it(row: Any) -> None:
    assert family_for({"model_type": row.model_type}) == row.model_type
