"""The cases of families with linear attention, state-space layers and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oracle_case import FULL, LEFT_OUT, Case, rope

LINEAR = "linear_attention"
DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
QWEN: Mapping[str, Any] = {
    **DELTA,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
# softplus(x + 1) of the tiny models is mostly between 0.5 and 3
STEPS: Mapping[str, Any] = {"time_step_limit": [1.0, 1.6]}
FALCON: Mapping[str, Any] = {
    **MAMBA2,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.7],
    "ssm_multipliers": [0.5, 0.8, 0.9, 1.1, 0.7],
}
GRANITE: Mapping[str, Any] = {
    **MAMBA2,
    "layer_types": [LINEAR, FULL, LINEAR],
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
NO_SIZE: Mapping[str, Any] = {"intermediate_size": LEFT_OUT}
MAMBA: Mapping[str, Any] = {**NO_SIZE, "state_size": 8, "time_step_rank": 5}
SSM: Mapping[str, Any] = {
    **NO_SIZE, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16
}  # fmt: skip
NEMOTRON: Mapping[str, Any] = {
    "num_hidden_layers": LEFT_OUT,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}
JAMBA: Mapping[str, Any] = {
    "head_dim": LEFT_OUT,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 6,
    "mamba_d_state": 8,
    "mamba_dt_rank": 5,
}
LFM2: Mapping[str, Any] = {"head_dim": LEFT_OUT, "layer_types": ["conv", FULL, "conv"]}

HYBRID: dict[str, Case] = {
    "qwen3-next": Case("qwen3_next", {**QWEN, "partial_rotary_factor": 0.25}),
    "qwen3-next-options": Case(
        "qwen3_next",
        {**QWEN, **rope(partial_rotary_factor=0.5), "layer_types": LEFT_OUT, "full_attention_interval": 2,
         "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "attention_bias": True, "norm_topk_prob": False,
         "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3-5": Case("qwen3_5_text", {**DELTA, "layer_types": [LINEAR, FULL, LINEAR]}),
    "qwen3-5-options": Case(
        "qwen3_5_text",
        {**DELTA, **rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
         "full_attention_interval": 3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-5-moe": Case("qwen3_5_moe_text", QWEN),
    "qwen3-5-moe-options": Case(
        "qwen3_5_moe_text", {**QWEN, "layer_types": [FULL, LINEAR, LINEAR], "attention_bias": True}
    ),
    "olmo-hybrid": Case("olmo_hybrid", {**DELTA, "layer_types": [LINEAR, LINEAR, FULL]}),
    "olmo-hybrid-options": Case(
        # what transformers saves is right only where all three convolutions have as many channels
        "olmo_hybrid",
        {"num_hidden_layers": 2, "layer_types": [FULL, LINEAR], "rope_parameters": LEFT_OUT, "attention_bias": True,
         "linear_value_head_dim": 12, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 2,
         "tie_word_embeddings": True},
    ),
    "bamba": Case("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "bamba-options": Case(
        "bamba",
        {**MAMBA2, **STEPS, "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_expand": 3, "mamba_n_groups": 1,
         "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True,
         "mlp_bias": True},
    ),
    "falcon-h1": Case("falcon_h1", {**FALCON, "mamba_rms_norm": True}),
    "falcon-h1-options": Case(
        "falcon_h1",
        {**FALCON, **STEPS, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True,
         "projectors_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
    ),
    "falcon-h1-no-norm": Case("falcon_h1", {**FALCON, "mamba_d_ssm": None, "tie_word_embeddings": True}),
    "granitemoehybrid": Case("granitemoehybrid", {**GRANITE, "position_embedding_type": "rope"}),
    "granitemoehybrid-options": Case(
        "granitemoehybrid",
        {**GRANITE, **STEPS, "mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True,
         "mamba_n_groups": 1, "tie_word_embeddings": True},
    ),
    "granitemoehybrid-dense": Case("granitemoehybrid", {**GRANITE, "num_local_experts": 0, "layer_types": LEFT_OUT}),
    "jamba": Case("jamba", JAMBA),
    "jamba-options": Case(
        "jamba",
        {**JAMBA, "num_experts": 1, "mamba_dt_rank": "auto", "mamba_d_conv": 3, "mamba_conv_bias": False,
         "mamba_proj_bias": True, "mamba_expand": 1, "tie_word_embeddings": True},
    ),
    "jamba-experts": Case("jamba", {**JAMBA, "expert_layer_period": 3, "expert_layer_offset": 0,
                                    "num_experts_per_tok": 3}),
    "mamba": Case("mamba", MAMBA),
    "mamba-options": Case(
        "mamba",
        {**MAMBA, "time_step_rank": "auto", "expand": 1, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False,
         "tie_word_embeddings": False},
    ),
    "falcon-mamba": Case("falcon_mamba", {**MAMBA, "mixer_rms_eps": 1e-2}),
    "falcon-mamba-options": Case("falcon_mamba", {**MAMBA, "use_bias": True, "tie_word_embeddings": False}),
    "mamba2": Case("mamba2", SSM),
    "mamba2-options": Case(
        "mamba2",
        {**SSM, **STEPS, "n_groups": 1, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False,
         "tie_word_embeddings": True},
    ),
    "nemotron-h": Case("nemotron_h", NEMOTRON),
    "nemotron-h-options": Case(
        "nemotron_h",
        {**NEMOTRON, "n_groups": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "time_step_min": 1.0,
         "moe_latent_size": 24, "mlp_hidden_act": "gelu", "use_bias": True, "use_conv_bias": False, "conv_kernel": 3,
         "mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "lfm2": Case("lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2-options": Case(
        "lfm2",
        {**LFM2, "layer_types": LEFT_OUT, "full_attn_idxs": [2], "block_multiple_of": 24,
         "block_ffn_dim_multiplier": 1.3, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "lfm2-moe": Case("lfm2_moe", {**LFM2, "num_experts": 6, "moe_intermediate_size": 32, "num_dense_layers": 1}),
    "lfm2-moe-options": Case(
        "lfm2_moe",
        {**LFM2, "num_experts": 6, "moe_intermediate_size": 32, "num_dense_layers": 0, "use_expert_bias": False,
         "norm_topk_prob": False, "routed_scaling_factor": 1.7, "num_experts_per_tok": 2, "conv_bias": True,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip
