"""The cases of families whose layers have an unusual shape: wide residual streams, second embeddings, shared keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oracle_case import FULL, LEFT_OUT, SLIDING, Case
from oracle_latent import SPARSE_KEYS
from oracle_moe import DENSE, NO_GROUPS, SPARSE

GEMMA4: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 9,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 160,
    "global_head_dim": 32,
}
GEMMA4_MOE: Mapping[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
WIDE, NARROW = "hybrid", "hybrid_sliding"
INKLING: Mapping[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 24,
    "sliding_window_size": 9,
    "rel_extent": 20,
    "d_rel": 6,
    "layer_types": [NARROW, WIDE, NARROW],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "logits_mup_width_multiplier": 2.0,
    "route_scale": 1.7,
}
LINEAR = "linear_attention"
MINIMAX: Mapping[str, Any] = {
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "block_size": 8,
    "layer_types": [FULL, LINEAR, LINEAR],
    "sliding_window": None,
}
LRU: Mapping[str, Any] = {
    "lru_width": 64,
    "attention_window_size": 9,
    "num_key_value_heads": 1,
    "head_dim": LEFT_OUT,
    "block_types": ["recurrent", "recurrent", "attention"],
}
HY: Mapping[str, Any] = {**SPARSE_KEYS, "head_dim": 20, "hc_mult": 2, "hc_eps": 1e-3}
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
V4: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "layer_types": [SLIDING, CSA, HCA, CSA],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "partial_rotary_factor": 0.5,
    "compress_rates": {CSA: 4, HCA: 8},
    "sliding_window": 5,
    "hc_mult": 2,
    "hc_eps": 1e-3,
    "hc_sinkhorn_iters": 3,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_topk": 3,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "rope_parameters": LEFT_OUT,
    "rope_theta": 777.0,
    "compress_rope_theta": 4321.0,
}
BLOCKS = "minimax_m3_sparse"
M3: Mapping[str, Any] = {
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "layer_types": [BLOCKS, FULL, BLOCKS],
    "mlp_layer_types": [DENSE, SPARSE, SPARSE],
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 4321.0, "partial_rotary_factor": 0.5},
}
EXOTIC: dict[str, Case] = {
    "gemma4": Case("gemma4_text", GEMMA4),
    "gemma4-moe": Case(
        "gemma4_text",
        {**GEMMA4, **GEMMA4_MOE, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "final_logit_softcapping": 2.0},
    ),
    "gemma4-shared": Case(
        "gemma4_text",
        {**GEMMA4, "num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
         "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "global_head_dim": 16,
         "attention_bias": True, "tie_word_embeddings": False,
         "rope_parameters": {
             SLIDING: {"rope_type": "default", "rope_theta": 777.0},
             FULL: {"rope_type": "proportional", "rope_theta": 4321.0, "partial_rotary_factor": 0.5},
         }},
    ),
    "inkling": Case("inkling_text", INKLING),
    "inkling-options": Case(
        "inkling_text",
        {**INKLING, "layer_types": LEFT_OUT, "local_layer_ids": [1], "conv_kernel_size": 3, "n_shared_experts": 1,
         "log_scaling_n_floor": 5, "log_scaling_alpha": 0.4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "minimax": Case("minimax", MINIMAX),
    "minimax-factors": Case(
        "minimax",
        {**MINIMAX, "layer_types": [FULL, LINEAR, FULL, LINEAR], "num_hidden_layers": 4, "full_attn_alpha_factor": 1.5,
         "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.9,
         "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "recurrent-gemma": Case("recurrent_gemma", LRU),
    "recurrent-gemma-options": Case(
        "recurrent_gemma",
        {**LRU, "block_types": ["attention", "recurrent"], "lru_width": 48, "conv1d_width": 3, "num_key_value_heads": 4,
         "logits_soft_cap": 2.0, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "rwkv": Case("rwkv", {"attention_hidden_size": 64, "context_length": 128}),
    "rwkv-widths": Case(
        "rwkv", {"attention_hidden_size": 48, "intermediate_size": LEFT_OUT, "context_length": 128,
                 "tie_word_embeddings": True}
    ),
    "hy-v4": Case("hy_v4", HY),
    "hy-v4-options": Case(
        "hy_v4",
        {**HY, **NO_GROUPS, "hc_mult": 3, "hc_magnitude": 1.3, "swiglu_limit": 0.7, "num_hidden_layers": 4,
         "indexer_types": ["full", "shared", "full", "shared"], "mlp_layer_types": [SPARSE, DENSE, SPARSE, DENSE],
         "attention_bias": True},
    ),
    "deepseek-v4": Case("deepseek_v4", V4),
    "deepseek-v4-options": Case(
        "deepseek_v4",
        {**V4, "layer_types": [HCA, CSA, SLIDING, HCA], "mlp_layer_types": LEFT_OUT, "num_hash_layers": 2,
         "compress_rates": {CSA: 2, HCA: 5}, "hc_mult": 3, "hc_sinkhorn_iters": 1, "scoring_func": "sigmoid",
         "swiglu_limit": 0.7, "routed_scaling_factor": 1.1, "partial_rotary_factor": 0.25,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                             "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "minimax-m3": Case("minimax_m3_vl_text", M3),
    "minimax-m3-options": Case(
        "minimax_m3_vl_text",
        {**M3, "layer_types": LEFT_OUT, "mlp_layer_types": LEFT_OUT, "moe_layer_freq": [1, 0, 1], "swiglu_alpha": 1.3,
         "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 4,
                                     "sparse_index_dim": 16, "sparse_block_size": 3, "sparse_topk_blocks": 4,
                                     "sparse_local_block": 2},
         "swiglu_limit": 0.9, "routed_scaling_factor": 1.3, "tie_word_embeddings": True},
    ),
}  # fmt: skip
