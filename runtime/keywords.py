"""The names of vLLM's arguments, so that a script ports by its import: what each means here, if anything.

A keyword whose value asks for what happens anyway is taken; any other value is refused, never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.conf.errors import ConfigError, nearest

KEYWORDS = {
    "dtype": "model.dtype",
    "max_model_len": "model.max_len",
    "block_size": "kv.page_tokens",
    "enable_prefix_caching": "kv.prefix_cache",
    "kv_cache_memory_bytes": "kv.memory",
    "kv_offloading_size": "kv.host_memory",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_step_tokens",
    "async_scheduling": "scheduler.overlap",
    "gpu_memory_utilization": "hardware.memory",
    "device": "hardware.device",
    "enforce_eager": "passes.compile",
    "load_format": "model.weights",
    "revision": "model.revision",
    "generation_config": "model.generation_config",
    "seed": "scheduler.seed",
}
"""keywords of LLM that are also a key of the configuration"""

DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of element types"""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "additional_config": ({},),
    "allowed_local_media_path": ("",),
    "attention_backend": (),
    "calculate_kv_scales": (False,),
    "compilation_config": (),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "cuda_graph_sizes": ([],),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_async_output_proc": (True, False),
    "disable_cascade_attn": (True, False),
    "disable_chunked_mm_input": (True, False),
    "disable_custom_all_reduce": (True, False),
    "disable_hybrid_kv_cache_manager": (True, False),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "disable_mm_preprocessor_cache": (True, False),
    "disable_sliding_window": (False,),
    "distributed_executor_backend": (),
    "download_dir": (),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_log_requests": (True, False),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_return_routed_experts": (False,),
    "enable_sleep_mode": (False,),
    "fully_sharded_loras": (False,),
    "guided_decoding_backend": ("auto",),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (),
    "ignore_patterns": (),
    "kv_cache_dtype": ("auto",),
    "kv_sharing_fast_prefill": (False,),
    "kv_offloading_backend": ("native",),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processor_pattern": (),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "long_prefill_token_threshold": (0,),
    "max_logprobs": tuple(range(1, 21)),
    "max_long_partial_prefills": (1,),
    "max_num_partial_prefills": (1,),
    "max_seq_len_to_capture": (8192,),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto",),
    "model_loader_extra_config": ({},),
    "num_scheduler_steps": (1,),
    "optimization_level": (),
    "override_generation_config": ({},),
    "override_neuron_config": ({},),
    "override_pooler_config": (),
    "pipeline_parallel_size": (1,),
    "pooler_config": (),
    "preemption_mode": (),
    "prefix_caching_hash_algo": ("builtin", "sha256", "sha256_cbor"),
    "profiler_config": (),
    "quantization": (),
    "ray_workers_use_nsight": (False,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "served_model_name": (),
    "skip_tokenizer_init": (False,),
    "speculative_config": (),
    "stream_interval": (1,),
    "structured_outputs_config": (),
    "swap_space": (0, 4),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer": (),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": ("main",),
    "trust_remote_code": (True, False),
    "use_tqdm_on_load": (True, False),
    "use_v2_block_manager": (True,),
    "worker_cls": ("auto",),
}
"""other keywords of vLLM's LLM, with the values that ask for nothing; None does not for any of them"""

NEUTRAL_PARAMS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "thinking_token_budget": (),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "guided_decoding": (),
    "length_penalty": (1,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
"""parameters of vLLM's SamplingParams that have no effect here, in the same way"""

NEUTRAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string"),
    "lora_request": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (
        0,
        [],
    ),
    "tokenization_kwargs": ({},),
}
"""other arguments of LLM.generate and LLM.chat, in the same way"""

_ANY_KEY = "any key of the configuration goes into overrides=['group.key=value']"
_HINTS = {
    "kv_cache_dtype": "keys and values have the model's dtype; model.dtype changes both",
    "logits_processors": "they are entry points of treadle.logits_processors; SamplingParams names them",
    "override_generation_config": "SamplingParams(...) says how to sample",
    "hf_overrides": "overrides=['model.config.KEY=VALUE'] lays a key over config.json",
    "kv_transfer_config": "overrides=['kv.connectors=[{name: peer}]'] says where state goes; docs/tiers.md",
    "quantization": "overrides=['passes.quantize=int8'] quantizes weights",
    "served_model_name": "overrides=['model.name=NAME'] names the model",
}


def asks_nothing(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether ``value`` of a keyword in ``neutral`` is what happens anyway."""
    return name in neutral and (value is None or value in neutral[name])


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of LLM.generate or LLM.chat that asks for something."""
    for name, value in given.items():
        if not asks_nothing(name, value, NEUTRAL_ARGUMENTS):
            known = name in NEUTRAL_ARGUMENTS
            close = () if known else nearest(name, list(NEUTRAL_ARGUMENTS))
            raise ConfigError(
                "not supported yet" if known else "no such argument", key=name, value=value, nearest=close
            )


def llm_overrides(keywords: Mapping[str, Any], model: str | None) -> list[str]:
    """Return the keywords of an LLM of ``model`` as overrides; those that ask for nothing give none.

    Raises: ConfigError for one that means nothing here, or that is known and not supported.
    """
    neutral = NEUTRAL if model is None else {**NEUTRAL, "tokenizer": (model,)}
    overrides = []
    for name, value in keywords.items():
        if name in KEYWORDS:
            overrides += [] if value is None else _override(name, value)
        elif not asks_nothing(name, value, neutral):
            known = name in neutral
            close = () if known else nearest(name, [*KEYWORDS, *NEUTRAL])
            hint = _HINTS.get(name, _taken(name, neutral) if known else _ANY_KEY)
            problem = "not supported yet by LLM" if known else "no such keyword of LLM"
            raise ConfigError(problem, key=name, value=value, nearest=close, hint=hint)
    return overrides


def _taken(name: str, neutral: Mapping[str, tuple[Any, ...]]) -> str:
    """Return the hint that names the values of a keyword which ask for nothing."""
    values = " or ".join(f"{name}={value!r}" for value in neutral[name])
    return f"{values} changes nothing and is taken" if values else "leave it out"


def _override(name: str, value: Any) -> list[str]:
    """Return the overrides that one of KEYWORDS stands for."""
    match name:
        case "dtype":
            text = str(value).removeprefix("torch.")
            value = DTYPES.get(text, text)
        case "gpu_memory_utilization":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError("not a share of the device's memory in (0, 1]", key=name, value=value)
            value = f"{100 * value:.12g}%"
        case "kv_offloading_size":
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError("not a number of GiB", key=name, value=value)
            value = int(value * (1 << 30))
        case "enforce_eager":
            # Compiled is what the configuration says by itself, and only where that pays.
            if not value:
                return []
            value = False
        case "generation_config":
            if value not in ("auto", "vllm"):
                raise ConfigError(
                    "not supported yet by LLM", key=name, value=value, nearest=["generation_config='auto'"]
                )
            value = "auto" if value == "auto" else "none"
        case "revision":
            if value == "main":
                return []
        case "load_format":
            if value in ("auto", "safetensors", "gguf", "hf"):
                return []
            if value != "dummy":
                raise ConfigError("not supported yet by LLM", key=name, value=value, nearest=["load_format='dummy'"])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{KEYWORDS[name]}={text}"]
