"""GGUF files of the oracle's checkpoints, as llama.cpp's conversion would write them."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from treadle.graph.source import open_source

TYPES = {
    name: Type[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")
}  # those that the gguf package can write; the others are in test_gguf_types.py
NAMES = {
    r"model\.embed_tokens\.": "token_embd.",
    r"model\.norm\.": "output_norm.",
    r"lm_head\.": "output.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"blk.\1.attn_norm.",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"blk.\1.attn_\2.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"blk.\1.attn_output.",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.": r"blk.\1.attn_\2_norm.",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.": r"blk.\1.ffn_\2.",
}
PLAIN = {r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.ffn_norm."}
BEHIND = {
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.post_attention_norm.",
    r"model\.layers\.(\d+)\.post_feedforward_layernorm\.": r"blk.\1.post_ffw_norm.",
}
SANDWICH = {**BEHIND, r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.": r"blk.\1.ffn_norm."}
MIXED = {
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.": r"blk.\1.ffn_gate_inp.",
    r"model\.layers\.(\d+)\.mlp\.experts\.(gate|up|down)_proj\.": r"blk.\1.ffn_\2_exps.",
    r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.w1\.": r"blk.\1.ffn_gate_exps.",
    r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.w2\.": r"blk.\1.ffn_down_exps.",
    r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.w3\.": r"blk.\1.ffn_up_exps.",
    r"model\.layers\.(\d+)\.mlp\.shared_expert\.(gate|up|down)_proj\.": r"blk.\1.ffn_\2_shexp.",
    r"model\.layers\.(\d+)\.mlp\.shared_expert_gate\.": r"blk.\1.ffn_gate_inp_shexp.",
}
JOINED = {
    r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.": r"blk.\1.attn_qkv.",
    r"model\.layers\.(\d+)\.mlp\.gate_up_proj\.": r"blk.\1.ffn_up.",
}
SINKS = {
    r"model\.layers\.(\d+)\.self_attn\.sinks$": r"blk.\1.attn_sinks.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.post_attention_norm.",
    r"model\.layers\.(\d+)\.mlp\.router\.": r"blk.\1.ffn_gate_inp.",
}
OF = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "olmo2": BEHIND,
    "phi3": JOINED,
    "gpt-oss": SINKS,
    "seed_oss": BEHIND,
}
"""architecture -> the names that it has of its own"""
ROTATED = ("llama", "granite", "smollm3", "arcee")
"""those whose rows of q and k are put in another order"""
KEYS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """What llama.cpp's conversion does to q and k of the llama architecture."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What llama.cpp's conversion does to experts: one tensor for all of a layer."""
    whole, parts = {}, defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            parts[match[1] + match[3]][int(match[2])] = tensor
        elif name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias")):
            stem, kind = name.partition(".gate_up_proj")[0], "bias" if name.endswith("bias") else "weight"
            if "down" in name:
                whole[name.replace("_proj_bias", "_proj.bias")] = tensor
                continue
            rows = tensor if kind == "bias" else tensor.transpose(1, 2)
            whole[f"{stem}.gate_proj.{kind}"], whole[f"{stem}.up_proj.{kind}"] = rows[:, ::2], rows[:, 1::2]
        elif name.endswith("experts.down_proj"):
            whole[f"{name}.weight"] = tensor.transpose(1, 2)
        else:
            whole[name] = tensor
    return whole | {name: torch.stack([some[i] for i in range(len(some))]) for name, some in parts.items()}


def write(model: Any, path: Path, architecture: str, kind: str = "F32", **metadata: Any) -> Path:
    """Write the file that llama.cpp's conversion would make of a directory; ``model`` has its path and config."""
    source, config = open_source(model.path), model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(key):
            getattr(writer, f"add_{key}")(config[key])
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value) if isinstance(value, str) else writer.add_float32(
            key.replace("__", "."), value
        )
    for name, value in config.items():
        if name in KEYS and value is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{architecture}.{KEYS[name]}", value)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    for name, tensor in stacked({name: source.read(name).float() for name in source.tensors}).items():
        if architecture in ROTATED and (match := re.search(r"self_attn\.([qk])_proj", name)):
            tensor = permuted(tensor, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze()
        rules = {**MIXED, **NAMES, **PLAIN, **OF.get(architecture, {})}
        renamed = next(re.sub(pattern, to, name) for pattern, to in rules.items() if re.match(pattern, name))
        array = tensor.contiguous().numpy()
        stored = TYPES[kind] if tensor.ndim >= 2 else Type.F32
        writer.add_tensor(renamed, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
