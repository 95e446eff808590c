"""The cases of dense families other than llama, mistral, qwen and gemma."""

from __future__ import annotations

from oracle_case import FULL, GEMMA, LEFT_OUT, LLAMA3, LONGROPE, SLIDING, YARN, Case, rope

MUP = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
WINDOWS = {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
DENSE: dict[str, Case] = {
    "granite": Case("granite", MUP),
    "granite-bias-tied": Case(
        "granite", {**MUP, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "granite_swa": Case("granite_swa", {**MUP, **WINDOWS, "layer_rope_theta": [4321.0, 0.0, 77.0]}),
    "granite_swa-untied": Case(
        "granite_swa", {**MUP, "sliding_window": 9, "layer_rope_theta": [55.0] * 3, "tie_word_embeddings": False}
    ),
    "hyperclovax": Case("hyperclovax", {**MUP, "logits_scaling": 0.25}),
    "hyperclovax-pre-only": Case(
        "hyperclovax", {**MUP, "use_post_norm": False, "attention_bias": True, "mlp_bias": True}
    ),
    "cohere": Case("cohere", {"logit_scale": 0.25}),
    "cohere-qk-norm-bias": Case("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": Case("cohere2", {"logit_scale": 0.25, **WINDOWS}),
    "cohere2-bias": Case("cohere2", {"sliding_window": 9, "num_hidden_layers": 5, "attention_bias": True}),
    "olmo": Case("olmo"),
    "olmo-clip-bias": Case("olmo", {"clip_qkv": 0.8, "attention_bias": True}),
    "olmo2": Case("olmo2"),
    "olmo2-bias-mqa": Case("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo3": Case(
        "olmo3", {**WINDOWS, "rope_parameters": {SLIDING: rope()["rope_parameters"], FULL: YARN["rope_parameters"]}}
    ),
    "olmo3-period": Case("olmo3", {"sliding_window": 9, "num_hidden_layers": 5, "attention_bias": True}),
    "exaone4": Case("exaone4", WINDOWS),
    "exaone4-no-window": Case("exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    "ernie4_5": Case("ernie4_5"),
    "ernie4_5-bias-untied": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense"),
    "hunyuan_v1_dense-alpha-bias": Case(
        "hunyuan_v1_dense", {**rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True}
    ),
    "helium": Case("helium"),
    "helium-bias-tied": Case("helium", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "seed_oss": Case("seed_oss"),
    "seed_oss-all-biases": Case("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "seed_oss-no-bias": Case("seed_oss", {"attention_bias": False}),
    "arcee": Case("arcee"),
    "arcee-yarn-bias": Case("arcee", {**YARN, "attention_bias": True, "mlp_bias": True}),
    "apertus": Case("apertus", LLAMA3),
    "apertus-bias": Case("apertus", {"attention_bias": True}),
    "bitnet": Case("bitnet"),
    "bitnet-bias": Case("bitnet", {"attention_bias": True}),
    "diffllama": Case("diffllama"),
    "diffllama-mha-bias": Case("diffllama", {"num_key_value_heads": 4, "attention_bias": True}),
    "jais2": Case("jais2"),
    "jais2-no-bias": Case("jais2", {"attention_bias": False, "mlp_bias": False}),
    "nemotron": Case("nemotron"),
    "nemotron-bias": Case("nemotron", {**rope(partial_rotary_factor=0.25), "attention_bias": True, "mlp_bias": True}),
    "nanochat": Case("nanochat", {"final_logit_softcapping": 2.0}),
    "nanochat-bias": Case("nanochat", {"final_logit_softcapping": None, "attention_bias": True}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": Case(
        "smollm3",
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "cwm": Case("cwm", {"sliding_window": 9, **LLAMA3}),
    "cwm-mlp-bias": Case("cwm", {**WINDOWS, "mlp_bias": True}),
    "ministral": Case("ministral", WINDOWS),
    "ministral-all-windows": Case("ministral", {"sliding_window": 9}),
    "ministral3": Case(
        "ministral3",
        {
            "sliding_window": None,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=8,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=1.0,
                mscale_all_dim=0.7,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
    "ministral3-window": Case(
        "ministral3",
        {"sliding_window": 9, **rope("yarn", factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.3)},
    ),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "starcoder2-window": Case("starcoder2", {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": False}),
    "phi3": Case("phi3"),
    "phi3-window-partial": Case(
        "phi3", {"sliding_window": 9, "tie_word_embeddings": True, **rope(partial_rotary_factor=0.5)}
    ),
    # Every prompt is longer than the original length, so that all of them take the long divisors.
    "phi3-longrope": Case(
        "phi3",
        {
            "original_max_position_embeddings": 2,
            **LONGROPE,
            "rope_parameters": {
                k: v
                for k, v in LONGROPE["rope_parameters"].items()
                if k not in ("factor", "original_max_position_embeddings")
            },
        },
    ),
    "glm": Case("glm"),
    "glm-no-bias": Case(
        "glm", {"attention_bias": False, "tie_word_embeddings": True, **rope(partial_rotary_factor=0.25)}
    ),
    "glm4": Case("glm4"),
    "stablelm": Case("stablelm"),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "persimmon": Case("persimmon"),
    "persimmon-plain": Case(
        "persimmon", {"qk_layernorm": False, "tie_word_embeddings": True, **rope(partial_rotary_factor=0.25)}
    ),
    "phi": Case("phi"),
    "phi-qk-norm": Case("phi", {"qk_layernorm": True, **rope(partial_rotary_factor=0.25)}),
    "vaultgemma": Case("vaultgemma", {**GEMMA, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0}),
    "gpt_neox": Case("gpt_neox"),
    "gpt_neox-sequential": Case(
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            **rope(partial_rotary_factor=0.5),
        },
    ),
    "falcon-7b": Case("falcon"),
    "falcon-40b": Case("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon-11b": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True}
    ),
    "falcon-alibi": Case(
        "falcon",
        {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True, "ffn_hidden_size": 96},
        attention="sdpa",
    ),
    "bloom": Case("bloom"),
    "bloom-post-residual": Case(
        "bloom",
        {
            "n_head": 6,
            "num_attention_heads": LEFT_OUT,
            "hidden_size": 96,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "mpt": Case("mpt", {"max_seq_len": 128}),
    "mpt-clip": Case(
        "mpt",
        {"max_seq_len": 128, "tie_word_embeddings": False, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}},
    ),
    "gpt2": Case("gpt2"),
    "gpt2-inverse-scale": Case(
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 96,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "gpt2-unscaled": Case("gpt2", {"scale_attn_weights": False}),
    "gpt_bigcode": Case("gpt_bigcode"),
    "gpt_bigcode-mha": Case("gpt_bigcode", {"multi_query": False, "n_inner": 96, "tie_word_embeddings": False}),
    "gpt_neo": Case("gpt_neo", {"attention_types": [[["global", "local", "local"], 1]], "window_size": 9}),
    "gptj": Case("gptj", {"rotary_dim": 8}),
    "gptj-inner": Case("gptj", {"rotary_dim": 16, "n_inner": 96}),
    "codegen": Case("codegen", {"rotary_dim": 8}),
    "openai-gpt": Case("openai-gpt"),
    "openai-gpt-relu": Case("openai-gpt", {"afn": "relu"}),
    "ctrl": Case("ctrl", {"dff": 96}),
    "opt": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-350m": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt-no-bias": Case(
        "opt",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "xglm": Case("xglm", {"ffn_dim": 96}),
    "xglm-unscaled": Case("xglm", {"ffn_dim": 96, "scale_embedding": False, "activation_function": "relu"}),
    "biogpt": Case("biogpt"),
    "biogpt-unscaled": Case("biogpt", {"scale_embedding": False, "tie_word_embeddings": False}),
}
