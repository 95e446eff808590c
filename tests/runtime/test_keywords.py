"""vLLM's names: those that mean something here, those that ask for nothing, and the rest refused by name."""

from __future__ import annotations

import msgspec
import pytest
import torch

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.runtime.keywords import KEYWORDS, NEUTRAL, NEUTRAL_PARAMS, llm_overrides, refuse_arguments
from treadle.runtime.request import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("keyword", "value", "override"),
    [
        ("dtype", "half", "model.dtype=float16"),
        ("dtype", "float", "model.dtype=float32"),
        ("dtype", "auto", "model.dtype=auto"),
        ("dtype", torch.bfloat16, "model.dtype=bfloat16"),
        ("gpu_memory_utilization", 0.9, "hardware.memory=90%"),
        ("gpu_memory_utilization", 0.55, "hardware.memory=55%"),
        ("gpu_memory_utilization", 1, "hardware.memory=100%"),
        ("enforce_eager", True, "passes.compile=false"),
        ("enforce_eager", False, None),
        ("enable_prefix_caching", False, "kv.prefix_cache=false"),
        ("enable_prefix_caching", None, None),
        ("max_model_len", None, None),
        ("load_format", "dummy", "model.weights=dummy"),
        ("load_format", "auto", None),
        ("kv_cache_memory_bytes", 1 << 30, f"kv.memory={1 << 30}"),
        ("kv_offloading_size", 1.5, f"kv.host_memory={3 << 29}"),
        ("kv_offloading_backend", "native", None),
        ("seed", 0, "scheduler.seed=0"),
        ("seed", None, None),
        ("max_logprobs", 5, None),
        ("swap_space", 4, None),
        ("tokenizer", "the/model", None),
        ("tokenizer", None, None),
        ("quantization", None, None),
    ],
)
def test_keywords_of_an_llm(keyword, value, override):
    overrides = llm_overrides({keyword: value}, "the/model")
    assert overrides == ([] if override is None else [override])
    if override is not None:
        compose(["model=hf", "model.path=x", *overrides])


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("tensor_parallel_size", 2, "not supported yet by LLM; tensor_parallel_size=1 changes nothing and is taken"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype=fp8: not supported yet by LLM; keys and values have the model's"),
        ("logits_processors", ["x"], "entry points of treadle.logits_processors"),
        ("quantization", "awq", "quantization=awq: not supported yet"),
        ("tokenizer", "another", "tokenizer=another: not supported yet"),
        ("enable_lora", True, "enable_lora=True: not supported yet"),
        ("load_format", "pt", "load_format=pt: not supported yet"),
        ("gpu_memory_utilization", 0, "not a share"),
        ("gpu_memory_utilization", True, "not a share"),
        ("kv_offloading_size", 0, "not a number of GiB"),
        ("kv_transfer_config", {"kv_connector": "x"}, "docs/tiers.md"),
        ("gpu_memory_utilisation", 0.9, "did you mean gpu_memory_utilization"),
        ("tensor_paralell_size", 1, "did you mean tensor_parallel_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keyword, value, message):
    with pytest.raises(ConfigError, match=message):
        llm_overrides({keyword: value}, "the/model")


def test_other_arguments_of_a_call_are_refused_by_name():
    refuse_arguments({"lora_request": None, "priority": 0, "tokenization_kwargs": None})
    with pytest.raises(ConfigError, match="lora_request=x: not supported yet"):
        refuse_arguments({"lora_request": "x"})
    with pytest.raises(ConfigError, match=r"lora_reqest.*did you mean lora_request"):
        refuse_arguments({"lora_reqest": None})


def test_a_keyword_has_one_meaning():
    assert not set(KEYWORDS) & set(NEUTRAL)
    assert not set(SamplingParams.__struct_fields__) & set(NEUTRAL_PARAMS)


@pytest.mark.parametrize("name", NEUTRAL_PARAMS)
def test_parameters_that_ask_for_nothing_are_taken(name):
    for value in (None, *NEUTRAL_PARAMS[name]):
        assert SamplingParams(top_k=3, **{name: value}) == SamplingParams(top_k=3)
    with pytest.raises(RequestError, match=f"{name}=.* is not supported yet; {name} takes") as caught:
        SamplingParams(**{name: 7})
    assert caught.value.field == name


def test_other_parameters_are_refused_by_name():
    with pytest.raises(RequestError, match=r"topp is not a sampling parameter; did you mean top_p\?") as caught:
        SamplingParams(topp=0.5)
    assert caught.value.field == "topp"
    with pytest.raises(RequestError, match=r"repetition_penalti .* did you mean repetition_penalty"):
        SamplingParams(repetition_penalti=1.0)
    with pytest.raises(RequestError, match="zzz is not a sampling parameter; known: n, presence_penalty"):
        SamplingParams(zzz=1)
    with pytest.raises(RequestError, match="by name"):
        SamplingParams(0.5)


def test_parameters_still_travel():
    params = SamplingParams(n=1, stop="x", top_p=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.structs.replace(params, top_k=3).top_k == 3
