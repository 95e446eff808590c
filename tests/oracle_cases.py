"""Which models the oracle makes: every family, each with the options that its description reads."""

from __future__ import annotations

from oracle_case import FULL, GEMMA, LEFT_OUT, LLAMA3, LONGROPE, SLIDING, UPPER, YARN, Case, rope
from oracle_dense import DENSE
from oracle_hybrid import HYBRID
from oracle_moe import MOE

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama-llama3": Case("llama", LLAMA3),
    "llama-linear": Case("llama", rope("linear", factor=3.0)),
    "llama-dynamic": Case("llama", rope("dynamic", factor=3.0)),
    "llama-yarn": Case("llama", YARN),
    "llama-longrope": Case("llama", LONGROPE),
    "llama-bias": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-mha": Case("llama", {"num_key_value_heads": 4}),
    "llama-mqa": Case("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": Case("llama", {"head_dim": 24}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-window": Case("mistral", {"sliding_window": 9}),
    "qwen2": Case("qwen2", {"head_dim": LEFT_OUT}),
    "qwen2-window": Case("qwen2", {**UPPER, "head_dim": LEFT_OUT}),
    "qwen3": Case("qwen3"),
    "qwen3-tied": Case("qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
    "qwen3-bias-window": Case("qwen3", {**UPPER, "attention_bias": True}),
    "gemma": Case("gemma"),
    "gemma2": Case("gemma2", {**GEMMA, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": Case("gemma2", {**GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma3": Case("gemma3_text", {**GEMMA, "layer_types": [SLIDING, SLIDING, FULL]}),
    "gemma3-linear": Case(
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 777.0},
                FULL: {"rope_type": "linear", "rope_theta": 4321.0, "factor": 3.0},
            },
        },
    ),
    "gemma3-untied-capped": Case(
        "gemma3_text", {**GEMMA, "num_hidden_layers": 6, "tie_word_embeddings": False, "final_logit_softcapping": 2.0}
    ),
    **DENSE,
    **MOE,
    **HYBRID,
}
"""Every option that the families' YAML reads, each in some case."""
