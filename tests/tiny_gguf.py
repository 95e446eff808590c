"""GGUF files of the oracle's checkpoints, as llama.cpp's conversion would write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from oracle import Tiny
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
SANDWICH = {
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.post_attention_norm.",
    r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.": r"blk.\1.ffn_norm.",
    r"model\.layers\.(\d+)\.post_feedforward_layernorm\.": r"blk.\1.post_ffw_norm.",
}


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """What llama.cpp's conversion does to q and k of the llama architecture."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def write(model: Tiny, path: Path, architecture: str, kind: str = "F32", **metadata: Any) -> Path:
    """Write the file that llama.cpp's conversion would make of a directory."""
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
    for name in source.tensors:
        tensor = source.read(name).float()
        if architecture == "llama" and (match := re.search(r"self_attn\.([qk])_proj", name)):
            tensor = permuted(tensor, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        rules = NAMES | (SANDWICH if architecture in ("gemma2", "gemma3") else PLAIN)
        renamed = next(re.sub(pattern, to, name) for pattern, to in rules.items() if re.match(pattern, name))
        array = tensor.contiguous().numpy()
        stored = TYPES[kind] if tensor.ndim == 2 else Type.F32
        writer.add_tensor(renamed, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
