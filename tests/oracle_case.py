"""What a case of the oracle is, and the sizes and options that cases share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 160
NEW_TOKENS = 12
SLIDING, FULL = "sliding_attention", "full_attention"
LEFT_OUT = "left out"
"""Stands for an option of ``sizes`` that is not given."""
GEMMA: Mapping[str, Any] = {"query_pre_attn_scalar": 24, "sliding_window": 9}
UPPER: Mapping[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}


def sizes() -> dict[str, Any]:
    """Return what every case begins with, new each time: configurations change the maps that they are given."""
    # eps and theta are not the usual ones, so that a default used by mistake shows
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 1e-2),
        "rope_parameters": {"rope_type": "default", "rope_theta": 4321.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    """Return the option that gives all layers one rope table."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 4321.0, **more}}


@dataclass(frozen=True)
class Case:
    """One checkpoint: the model type, and what differs from those of ``sizes`` that its configuration has."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "eager"
    """which of transformers' implementations is the reference"""
    packed: bool = False
    """whether the file holds experts in MXFP4"""
    surplus: str = ""
    """tensors, as a regular expression, that transformers makes and reads nowhere; published files lack them"""


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + i / 8 for i in range(8)],
    long_factor=[2.0 + i for i in range(8)],
    original_max_position_embeddings=128,
    factor=2.0,
)
