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
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_step_tokens",
    "async_scheduling": "scheduler.overlap",
    "gpu_memory_utilization": "hardware.memory",
    "device": "hardware.device",
    "enforce_eager": "passes.compile",
    "load_format": "model.weights",
    "revision": "model.revision",
    "generation_config": "model.generation_config",
}
"""keywords of LLM that are also a key of the configuration"""

DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of element types"""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "attention_backend": (),
    "compilation_config": (),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_async_output_proc": (True, False),
    "disable_custom_all_reduce": (True, False),
    "disable_log_stats": (True, False),
    "disable_sliding_window": (False,),
    "distributed_executor_backend": (),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_sleep_mode": (False,),
    "guided_decoding_backend": ("auto",),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (),
    "kv_cache_dtype": ("auto",),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processors": ([],),
    "max_logprobs": (20,),
    "max_seq_len_to_capture": (8192,),
    "mm_processor_kwargs": ({},),
    "num_scheduler_steps": (1,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (),
    "quantization": (),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "seed": (0,),
    "served_model_name": (),
    "skip_tokenizer_init": (False,),
    "speculative_config": (),
    "structured_outputs_config": (),
    "swap_space": (0, 4),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer": (),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": ("main",),
    "trust_remote_code": (True, False),
    "use_v2_block_manager": (True,),
}
"""other keywords of vLLM's LLM, with the values that ask for nothing; None does not for any of them"""

NEUTRAL_PARAMS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "frequency_penalty": (0,),
    "guided_decoding": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""parameters of vLLM's SamplingParams that have no effect here, in the same way"""

_HINTS = {
    "seed": "SamplingParams(seed=...) seeds a request",
    "hf_overrides": "overrides=['model.config.KEY=VALUE'] lays a key over config.json",
    "quantization": "overrides=['passes.quantize=int8'] quantizes weights",
    "served_model_name": "overrides=['model.name=NAME'] names the model",
}


def asks_nothing(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether ``value`` of a keyword in ``neutral`` is what happens anyway."""
    return name in neutral and (value is None or value in neutral[name])


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
            hint = _HINTS.get(name, "any key of the configuration goes into overrides=['group.key=value']")
            problem = "not supported yet by LLM" if known else "no such keyword of LLM"
            raise ConfigError(problem, key=name, value=value, nearest=close, hint=hint)
    return overrides


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
