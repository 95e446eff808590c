"""What the architectures of GGUF files are called and changed by llama.cpp's conversion: a row of data each.

``{expert}`` in a name marks a stack of experts, cut along its first dim into one tensor each, as the hub stores them.
Source: the tensor and key names of the GGUF specification, and the conversions that llama.cpp applies (undone here).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LAYER = r"model.layers.\1."
BLOCK = r"blk\.(\d+)\."

NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"output\.(weight|bias)": r"lm_head.\1",
    BLOCK + r"attn_norm\.weight": LAYER + "input_layernorm.weight",
    BLOCK + r"attn_output\.(weight|bias)": LAYER + r"self_attn.o_proj.\2",
    BLOCK + r"attn_([qkv])\.(weight|bias)": LAYER + r"self_attn.\2_proj.\3",
    BLOCK + r"attn_([qk])_norm\.weight": LAYER + r"self_attn.\2_norm.weight",
    BLOCK + r"ffn_(gate|up|down)\.(weight|bias)": LAYER + r"mlp.\2_proj.\3",
    BLOCK + r"ffn_norm\.weight": LAYER + "post_attention_layernorm.weight",
}
"""Tensor names that most architectures share."""

SANDWICH = {
    BLOCK + r"post_attention_norm\.weight": LAYER + "post_attention_layernorm.weight",
    BLOCK + r"ffn_norm\.weight": LAYER + "pre_feedforward_layernorm.weight",
    BLOCK + r"post_ffw_norm\.weight": LAYER + "post_feedforward_layernorm.weight",
}
"""Norms before and after each sublayer."""

EXPERTS = {
    BLOCK + r"ffn_gate_inp\.weight": LAYER + "mlp.gate.weight",
    BLOCK + r"ffn_(gate|up|down)_exps\.weight": LAYER + r"mlp.experts.{expert}.\2_proj.weight",
}
"""A router and experts."""

MIXTRAL = {
    BLOCK + r"ffn_gate_inp\.weight": LAYER + "block_sparse_moe.gate.weight",
    BLOCK + r"ffn_gate_exps\.weight": LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
    BLOCK + r"ffn_down_exps\.weight": LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
    BLOCK + r"ffn_up_exps\.weight": LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
}

SHARED_EXPERT = {
    BLOCK + r"ffn_gate_inp_shexp\.weight": LAYER + "mlp.shared_expert_gate.weight",
    BLOCK + r"ffn_(gate|up|down)_shexp\.weight": LAYER + r"mlp.shared_expert.\2_proj.weight",
}

GPT_OSS = {
    BLOCK + r"attn_sinks\.weight": LAYER + "self_attn.sinks",
    BLOCK + r"post_attention_norm\.weight": LAYER + "post_attention_layernorm.weight",
    BLOCK + r"ffn_gate_inp\.(weight|bias)": LAYER + r"mlp.router.\2",
    # The hub has gate and up in one tensor, row by row in turns; these are names of our own.
    BLOCK + r"ffn_(gate|up|down)_exps\.(weight|bias)": LAYER + r"mlp.experts.\2_proj.\3",
}

KEYS_OF_ALL = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""config.json key -> metadata key, for what every file must say."""

MOE = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

ROTATED = {r".*\.self_attn\.q_proj\.(weight|bias)": "q", r".*\.self_attn\.k_proj\.(weight|bias)": "k"}
"""Rows in the order of rope pairs side by side."""

RAISED = {r".*norm\.weight": "raised"}
"""Norm weights with the 1 added that the model adds itself."""

FFN = {"intermediate_size": "feed_forward_length"}
LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}

Get = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture: its model_type, and what differs from what most share."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    """patterns of tensor names -> hub names, tried before NAMES"""
    required: Mapping[str, str] = field(default_factory=lambda: FFN)
    """config.json keys -> metadata keys, beside KEYS_OF_ALL"""
    optional: Mapping[str, str] = field(default_factory=dict)
    """the same for keys that a file may leave out"""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """config.json keys that the architecture alone decides"""
    undo: Mapping[str, str] = field(default_factory=dict)
    """patterns of hub names -> what the conversion did: the rows of ``q`` or ``k`` stand in another order, ``raised``
    ones have 1 added, a ``row`` has become a vector"""
    derive: Callable[[Get, Mapping[str, Any]], dict[str, Any]] | None = None
    """more config.json keys, from metadata and the keys so far"""

    def hub_name(self, name: str) -> str:
        """Return a tensor's name on the hub; one that no rule knows stays as it is."""
        for pattern, target in (*self.names.items(), *NAMES.items()):
            if match := re.fullmatch(pattern, name):
                return match.expand(target)
        return name

    def change(self, name: str) -> str | None:
        """Return what the conversion did to the tensor of this hub name, None if nothing."""
        return next((what for pattern, what in self.undo.items() if re.fullmatch(pattern, name)), None)


def _query_scale(wide_layers: int) -> Callable[[Get, Mapping[str, Any]], dict[str, Any]]:
    """Return how Gemma scales queries: the largest by the mean head width of the stream, others by the head's own."""

    def derive(_: Get, config: Mapping[str, Any]) -> dict[str, Any]:
        mean = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": mean if config["num_hidden_layers"] == wide_layers else config["head_dim"]}

    return derive


def _no_window(get: Get, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window; a file says that there is none by 0."""
    return {"sliding_window": get("attention.sliding_window") or None}


def _untruncated(_: Get, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPT-OSS's rope: yarn whose bounds are no whole channels."""
    scaling = config.get("rope_scaling")
    return (
        {} if scaling is None else {"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, **scaling, "truncate": False}}
    )


_GEMMA_CAPS = {
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", undo=ROTATED),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "gemma": Architecture(model_type="gemma", undo=RAISED),
    "gemma2": Architecture(
        model_type="gemma2",
        names=SANDWICH,
        required={**FFN, "sliding_window": "attention.sliding_window"},
        optional=_GEMMA_CAPS,
        constants=dict.fromkeys(_GEMMA_CAPS),
        undo=RAISED,
        derive=_query_scale(wide_layers=46),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        names=SANDWICH,
        required={**FFN, "sliding_window": "attention.sliding_window"},
        optional={**_GEMMA_CAPS, "rope_local_base_freq": "rope.freq_base_swa"},
        constants={**dict.fromkeys(_GEMMA_CAPS), "rope_local_base_freq": 10000.0},
        undo=RAISED,
        derive=_query_scale(wide_layers=62),
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        names={**EXPERTS, **SHARED_EXPERT},
        required={**FFN, **MOE, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        constants={"norm_topk_prob": False},
        undo={r".*\.shared_expert_gate\.weight": "row"},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", names=EXPERTS, required={**FFN, **MOE}, constants={"norm_topk_prob": True}
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        names=EXPERTS,
        required={**FFN, "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        constants={"norm_topk_prob": False},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        names=GPT_OSS,
        required={
            **LOCAL_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        constants={"attention_bias": True},
        derive=_untruncated,
    ),
    "phi3": Architecture(
        model_type="phi3",
        names={
            BLOCK + r"attn_qkv\.weight": LAYER + "self_attn.qkv_proj.weight",
            BLOCK + r"ffn_up\.weight": LAYER + "mlp.gate_up_proj.weight",
        },
        derive=_no_window,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        names={
            BLOCK + r"post_attention_norm\.weight": LAYER + "post_attention_layernorm.weight",
            BLOCK + r"post_ffw_norm\.weight": LAYER + "post_feedforward_layernorm.weight",
        },
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        names={BLOCK + r"post_attention_norm\.weight": LAYER + "post_attention_layernorm.weight"},
        constants={"attention_bias": True, "attention_out_bias": False},
    ),
    "smollm3": Architecture(model_type="smollm3", constants={"no_rope_layer_interval": 4}, undo=ROTATED),
    "arcee": Architecture(model_type="arcee", constants={"hidden_act": "relu2"}, undo=ROTATED),
    "granite": Architecture(
        model_type="granite",
        optional={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        undo=ROTATED,
    ),
}
"""``general.architecture`` -> its row. One may stand here before its family does: that is then told to be missing."""

WITH_EXPERTS = {
    "llama": Architecture(model_type="mixtral", names=MIXTRAL, required={**FFN, **LOCAL_EXPERTS}, undo=ROTATED)
}
"""The same for files that also say how many experts there are."""


def architecture(metadata: Mapping[str, Any]) -> Architecture | None:
    """Return the row of a file's architecture, None if there is none."""
    name = str(metadata.get("general.architecture"))
    if name in WITH_EXPERTS and metadata.get(f"{name}.expert_count"):
        return WITH_EXPERTS[name]
    return ARCHITECTURES.get(name)
