"""The cases of families with latent attention, dense and sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oracle_case import LEFT_OUT, YARN, Case, rope
from oracle_moe import DENSE, GLM, NO_GROUPS, SPARSE

MLA: Mapping[str, Any] = {
    "head_dim": LEFT_OUT,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
NO_Q_LORA: Mapping[str, Any] = {"q_lora_rank": None}
MSCALE = {"rope_parameters": {**YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 0.7}}
DEEPSEEK: Mapping[str, Any] = {**MLA, **GLM, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS: Mapping[str, Any] = {"topk_method": "group_limited_greedy"}
LAYERS: Mapping[str, Any] = {"mlp_layer_types": [DENSE, SPARSE, DENSE], "first_k_dense_replace": LEFT_OUT}
# With few index heads many sums of relu are 0, and what is chosen among equals is nobody's wish.
SPARSE_KEYS: Mapping[str, Any] = {**DEEPSEEK, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 6}
LONGCAT: Mapping[str, Any] = {
    **MLA,
    "head_dim": 8,
    "num_layers": 2,
    "num_hidden_layers": LEFT_OUT,
    "intermediate_size": LEFT_OUT,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 6,
    "moe_topk": 4,
    "zero_expert_num": 3,
    "routed_scaling_factor": 1.7,
}
KIMI: Mapping[str, Any] = {
    **MLA,
    **NO_Q_LORA,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 32,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

LATENT: dict[str, Case] = {
    "deepseek-v2": Case("deepseek_v2", {**DEEPSEEK, **GROUPS, **MSCALE}),
    "deepseek-v2-lite": Case("deepseek_v2",
        {**DEEPSEEK, **NO_Q_LORA, "n_group": None, "topk_group": None, "attention_bias": True, "mlp_bias": True,
         "first_k_dense_replace": 0},
    ),
    "deepseek-v3": Case("deepseek_v3", {**DEEPSEEK, **MSCALE}),
    "deepseek-v3-options": Case("deepseek_v3",
        {**DEEPSEEK, **NO_Q_LORA, **NO_GROUPS, **YARN, "rope_interleave": False, "norm_topk_prob": False,
         "attention_bias": True, "num_nextn_predict_layers": 0},
    ),
    "axk1": Case("axk1", {**DEEPSEEK, **MSCALE, "moe_layer_freq": 2, "first_k_dense_replace": 1}),
    "axk1-options": Case("axk1", {**DEEPSEEK, **LAYERS, "rope_interleave": False, "attention_bias": True}),
    "glm4-moe-lite": Case("glm4_moe_lite", {**DEEPSEEK, **LAYERS}),
    "glm4-moe-lite-options": Case("glm4_moe_lite",
        {**DEEPSEEK, **NO_Q_LORA, **NO_GROUPS, "first_k_dense_replace": LEFT_OUT, "rope_interleave": False,
         "attention_bias": True},
    ),
    "minicpm3": Case("minicpm3", MLA),
    "minicpm3-options": Case("minicpm3",
        {**MLA, **NO_Q_LORA, **rope("linear", factor=3.0), "v_head_dim": None, "scale_emb": 3, "scale_depth": 0.9,
         "dim_model_base": 32, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "youtu": Case("youtu", {**MLA, **MSCALE, "pad_token_id": None}),
    "youtu-options": Case("youtu",
        {**MLA, **NO_Q_LORA, "rope_interleave": False, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "deepseek-v32": Case("deepseek_v32", {**SPARSE_KEYS, **MSCALE}),
    "deepseek-v32-options": Case("deepseek_v32",
        {**SPARSE_KEYS, **LAYERS, **NO_GROUPS, "index_head_dim": 8, "attention_bias": True, "norm_topk_prob": False},
    ),
    "glm-moe-dsa": Case("glm_moe_dsa",
        {**SPARSE_KEYS, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "glm-moe-dsa-frequency": Case("glm_moe_dsa",
        {**SPARSE_KEYS, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 4},
    ),
    "axk2": Case("axk2", {**SPARSE_KEYS, "gated_norm_rank": 8, "n_group": None, "topk_group": None}),
    "axk2-groups": Case("axk2", {**SPARSE_KEYS, **MSCALE, **LAYERS, "gated_norm_rank": 4, "attention_bias": True}),
    "longcat-flash": Case("longcat_flash",
        {**LONGCAT, **MSCALE}, surplus=r".*\.experts\.[678]\.(gate|up)_proj\.weight",
    ),
    "longcat-flash-options": Case("longcat_flash",
        {**LONGCAT, "zero_expert_num": 0, "moe_topk": 3, "attention_bias": True, "routed_scaling_factor": 0.8},
    ),
    "kimi-linear": Case("kimi_linear", KIMI),
    "kimi-linear-options": Case("kimi_linear",
        {**KIMI, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": False, "q_lora_rank": 24,
         "layer_types": LEFT_OUT, "mlp_layer_types": [SPARSE, DENSE, SPARSE], "attention_bias": True,
         "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 24,
                                "short_conv_kernel_size": 3}},
    ),
}  # fmt: skip
