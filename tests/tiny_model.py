"""A model directory of a few kilobytes, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a tiny llama with random weights into ``folder`` and return it; ``config`` is laid over CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> np.ndarray:
        return random.normal(0, 0.1, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": tensor(64, 32), "model.norm.weight": tensor(32)}
    for layer in range(2):
        shapes = {
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor(*shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
