"""The oracle's mixtures of experts: model type, and what differs from its SIZES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SLIDING, FULL = "sliding_attention", "full_attention"
DENSE, SPARSE = "dense", "sparse"
MIXTRAL: Mapping[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}
QWEN: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
OLMOE: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": None}
GLM: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
NO_GROUPS: Mapping[str, Any] = {"n_group": 1, "topk_group": 1}
RENAMED: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS: Mapping[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 9,
    "layer_types": [SLIDING, FULL, SLIDING],
    "swiglu_limit": 0.9,
}


def two_ropes(**scaled: Any) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 1.0}
    return {"rope_parameters": {SLIDING: local, FULL: {"rope_type": "default", "rope_theta": 4321.0, **scaled}}}


def dbrx(*, clip_qkv: float, moe_normalize_expert_weights: float | None = 1.0) -> dict[str, Any]:
    ffn = {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": 64}
    return {
        **dict.fromkeys(
            ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "head_dim")
        ),
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": clip_qkv, "rope_theta": 4321.0},
        "ffn_config": {**ffn, "moe_normalize_expert_weights": moe_normalize_expert_weights},
    }


MOE_CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window": ("mixtral", {**MIXTRAL, "sliding_window": 9, "num_experts_per_tok": 1, "head_dim": 24}),
    "qwen3-moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse": (
        "qwen3_moe",
        {**QWEN, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "olmoe": ("olmoe", {**OLMOE, "norm_topk_prob": True}),
    "olmoe-clipped": ("olmoe", {**OLMOE, "clip_qkv": 0.8, "attention_bias": True}),
    "flex-olmo": ("flex_olmo", OLMOE),
    "flex-olmo-normalised": ("flex_olmo", {**OLMOE, "norm_topk_prob": True, "attention_bias": True}),
    "mellum": (
        "mellum",
        {**QWEN, **two_ropes(), "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING],
         "mlp_layer_types": [SPARSE, DENSE, SPARSE]},
    ),
    "mellum-linear": (
        "mellum",
        {**QWEN, **two_ropes(rope_type="linear", factor=3.0), "sliding_window": 9, "layer_types": [FULL, SLIDING, FULL],
         "norm_topk_prob": False, "attention_bias": True},
    ),
    "glm4-moe": ("glm4_moe", {**GLM, "rope_parameters": {"rope_type": "default", "rope_theta": 4321.0,
                                                        "partial_rotary_factor": 0.5}}),
    "glm4-moe-options": (
        "glm4_moe",
        {**GLM, **NO_GROUPS, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False,
         "first_k_dense_replace": 2, "n_shared_experts": 2, "num_nextn_predict_layers": 0},
    ),
    "dots1": ("dots1", {**GLM, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "dots1-window": (
        "dots1",
        {**GLM, "n_shared_experts": 1, "sliding_window": 9, "max_window_layers": 1, "attention_bias": True},
    ),
    "solar-open": ("solar_open", GLM),
    "solar-open-options": ("solar_open", {**GLM, **NO_GROUPS, "attention_bias": True, "norm_topk_prob": False}),
    "exaone-moe": (
        "exaone_moe",
        {**RENAMED, "n_group": 4, "topk_group": 2, "sliding_window": 9, "sliding_window_pattern": 2,
         "num_shared_experts": 2},
    ),
    "exaone-moe-full": ("exaone_moe", {**RENAMED, "sliding_window": 9, "layer_types": [FULL] * 3,
                                       "mlp_layer_types": [SPARSE, DENSE, SPARSE], "norm_topk_prob": False}),
    "hy-v3": ("hy_v3", RENAMED),
    "hy-v3-options": (
        "hy_v3",
        {**RENAMED, "attention_bias": True, "num_shared_experts": 2, "mlp_layer_types": [SPARSE, DENSE, SPARSE],
         "router_scaling_factor": 1.3, "enable_moe_fp32_combine": False},
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        {**GLM, **two_ropes(partial_rotary_factor=0.5), "v_head_dim": 8, "sliding_window": 9, "num_key_value_heads": 1,
         "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    "mimo-v2-flash-options": (
        "mimo_v2_flash",
        {**GLM, **NO_GROUPS, **two_ropes(partial_rotary_factor=1.0), "v_head_dim": 24, "attention_value_scale": None,
         "attention_bias": True, "norm_topk_prob": False, "sliding_window": 9,
         "layer_types": [SLIDING, FULL, SLIDING], "mlp_layer_types": [SPARSE, SPARSE, DENSE]},
    ),
    "minimax-m2": ("minimax_m2", {**MIXTRAL, "rotary_dim": 8}),
    "minimax-m2-whole-rope": ("minimax_m2", {**MIXTRAL, "num_experts_per_tok": 3}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-options": (
        "gpt_oss",
        {**GPT_OSS, "attention_bias": False, "swiglu_limit": 3.0, "swiglu_alpha": 1.3, "layer_types": [FULL] * 3,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 4321.0, "factor": 4.0, "beta_fast": 16.0,
                             "beta_slow": 2.0, "truncate": False, "original_max_position_embeddings": 32}},
    ),
    "gpt-oss-mxfp4": ("gpt_oss", {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}),
    "dbrx": ("dbrx", dbrx(clip_qkv=8.0)),
    "dbrx-options": ("dbrx", dbrx(clip_qkv=0.8, moe_normalize_expert_weights=None)),
    "phimoe": ("phimoe", {**MIXTRAL, "head_dim": None}),
    "phimoe-options": (
        "phimoe",
        {**MIXTRAL, "head_dim": None, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9,
         "router_jitter_noise": 0.3},
    ),
}  # fmt: skip


def pack_mxfp4(model: torch.nn.Module) -> dict[str, Tensor]:
    """Round the experts of a GPT-OSS model to MXFP4 in place and return them as its published files hold them."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    packed = {}
    for name, weight in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")) or weight.ndim != 3:
            continue
        blocks = weight.detach().transpose(1, 2).unflatten(-1, (-1, 32))
        exponent = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        codes = (blocks / 2**exponent).unsqueeze(-1).sub(torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
        made = codes[..., 0::2] | (codes[..., 1::2] << 4)
        scales = (exponent.squeeze(-1) + 127).to(torch.uint8)
        packed |= {f"{name}_blocks": made.contiguous(), f"{name}_scales": scales.contiguous()}
        weight.data.copy_(convert_moe_packed_tensors(made, scales, dtype=torch.float32))
    return packed
