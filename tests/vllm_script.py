"""A script as it is written for vLLM's offline API. A test changes its import, and nothing else, and runs it."""

import math
from types import SimpleNamespace

from vllm import LLM, SamplingParams


def generate(llm: LLM) -> SimpleNamespace:
    prompts = ["the quick brown fox", "def f(x):", "jumps over the lazy dog and the other dogs"]
    sampling_params = llm.get_default_sampling_params()
    sampling_params.temperature = 0.8
    sampling_params.top_p, sampling_params.top_k, sampling_params.min_p = 0.95, 50, 0.01
    sampling_params.max_tokens, sampling_params.seed = 12, 1
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")
    again = llm.generate(prompts, [sampling_params] * 3, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in again]

    beside = SamplingParams(temperature=1.0, n=4, seed=11, max_tokens=10, logprobs=3, prompt_logprobs=1)
    (best_of,) = llm.generate({"prompt": prompts[0]}, beside)
    best = max(best_of.outputs, key=lambda each: each.cumulative_logprob / len(each.token_ids))
    perplexity = math.exp(-best.cumulative_logprob / len(best.token_ids))
    return SimpleNamespace(outputs=outputs, best_of=best_of, best=best, perplexity=perplexity)


def control(llm: LLM) -> SimpleNamespace:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("the lazy dog")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (free,) = llm.generate({"prompt_token_ids": ids}, greedy)
    text = free.outputs[0].text
    stop = text[4:6]
    (stopped,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=12, stop=[stop]))
    (kept,) = llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(temperature=0, max_tokens=12, stop=[stop], include_stop_str_in_output=True),
    )
    first = free.outputs[0].token_ids[0]
    (biased,) = llm.generate(
        [{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1, logit_bias={first: -100.0})
    )
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("y", "n"))
    (chosen,) = llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[yes, no], logprobs=1),
    )
    penalized = SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5,
        bad_words=["the"], ignore_eos=True, min_tokens=24, skip_special_tokens=False,
    )  # fmt: skip
    (varied,) = llm.generate([{"prompt_token_ids": ids}], penalized)
    return SimpleNamespace(
        free=free, stop=stop, stopped=stopped, kept=kept, first=first, biased=biased, chosen=chosen, yes_no=(yes, no),
        varied=varied, tokenizer=tokenizer,
    )  # fmt: skip


def chat(llm: LLM) -> SimpleNamespace:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "Write about dogs"}]},
    ]
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = [{"role": each["role"], "content": each["content"]} for each in conversation[:1]]
    prompt = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    (by_hand,) = llm.generate([prompt], params)
    (by_chat,) = llm.chat(plain, params, use_tqdm=False)
    many = llm.chat([conversation, plain], params, chat_template_kwargs={"enable_thinking": False})
    prefill = [*plain, {"role": "assistant", "content": "Dogs are"}]
    (continued,) = llm.chat(prefill, params, add_generation_prompt=False, continue_final_message=True)
    return SimpleNamespace(by_hand=by_hand, by_chat=by_chat, many=many, continued=continued)


def main(model: str) -> SimpleNamespace:
    llm = LLM(
        model=model,
        tokenizer=model,
        dtype="float32",
        max_model_len=128,
        gpu_memory_utilization=0.9,
        seed=7,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        trust_remote_code=True,
        tensor_parallel_size=1,
        load_format="dummy",
    )
    return SimpleNamespace(generate=generate(llm), control=control(llm), chat=chat(llm))
