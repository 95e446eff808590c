import pytest
from history_model import PAGE_TOKENS, VOCAB, Bench, answer
from letters import LETTERS, expected, letters_llm, text

from treadle.conf.errors import ConfigError
from treadle.runtime import LLM, RequestError, SamplingParams, SessionHint

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def bench():
    bench = Bench(max_queue=2)
    yield bench
    bench.engine.close()


@pytest.fixture
def llm(bench):
    return letters_llm(bench)


def test_outputs_come_in_the_order_of_prompts_whatever_ends_first(llm):
    prompts = ["abc", "bca" * 10, "c", "dd", "ef", "fgh", "abcd", "x", "wx", "q"]
    params = [SamplingParams(temperature=0, max_tokens=12 - i) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    for i, (prompt, output) in enumerate(zip(prompts, outputs)):
        assert output.prompt == prompt
        assert text(output.prompt_token_ids) == prompt
        completion = output.outputs[0]
        assert completion.token_ids == expected(prompt, 12 - i)
        assert completion.text == text(completion.token_ids)
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
        assert output.finished
    assert len({output.request_id for output in outputs}) == len(prompts)


@pytest.mark.parametrize(
    "prompts",
    ["abc", ["abc"], [0, 1, 2], [[0, 1, 2]], {"prompt": "abc"}, {"prompt_token_ids": [0, 1, 2]}, [{"prompt": "abc"}]],
)
def test_every_form_of_a_prompt(llm, prompts):
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [0, 1, 2]
    assert output.outputs[0].token_ids == expected("abc")
    assert output.prompt == (None if "[0, 1, 2]" in str(prompts) else "abc")


def test_no_prompts_no_outputs(llm):
    assert llm.generate([]) == []


def test_what_the_model_recommends_is_the_default(llm):
    assert llm.get_default_sampling_params().temperature == 0
    assert llm.generate("abc")[0].outputs[0].token_ids == expected("abc", 16)


def test_chat_of_one_and_of_many_conversations(llm):
    first = [{"role": "user", "content": "c"}, {"role": "user", "content": [{"type": "text", "text": "d"}]}]
    (single,) = llm.chat(first, GREEDY)
    assert single.prompt == "acdb"
    assert single.outputs[0].token_ids == expected("acdb")
    both = llm.chat([first, [{"role": "user", "content": "e"}]], GREEDY, add_generation_prompt=False)
    assert [output.prompt for output in both] == ["acd", "ae"]
    (own,) = llm.chat(first, GREEDY, chat_template="{{ x }}", chat_template_kwargs={"x": "ef"})
    assert own.prompt == "ef"
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])


def test_a_stop_string_ends_an_answer_and_frees_its_place(llm, bench):
    whole = expected("abc", 20)
    stop = text(whole[5:8])
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=20, stop=stop))
    completion = output.outputs[0]
    assert completion.text == text(whole)[: text(whole).index(stop)]
    assert completion.token_ids == whole[: text(whole).index(stop) + len(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert llm.generate("c", GREEDY)[0].outputs[0].token_ids == expected("c")
    stats = bench.engine.stats()
    assert (stats.num_running, stats.finished.get("stop")) == (0, 1)


def test_logprobs_in_vllms_shape(llm):
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 3
    for token, found in zip(completion.token_ids, completion.logprobs):
        assert found[token].rank == 1
        assert found[token].decoded_token == LETTERS[token]
        assert len(found) == 2
        assert found[token].logprob == max(entry.logprob for entry in found.values())
    total = sum(found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_several_answers_of_each_prompt(llm, bench):
    params = SamplingParams(temperature=1.2, n=5, seed=3, max_tokens=6, prompt_logprobs=1)
    first, second = llm.generate(["abcd", "c"], [params, GREEDY])
    assert [each.index for each in first.outputs] == [0, 1, 2, 3, 4]
    assert len({each.text for each in first.outputs}) > 1
    for index, completion in enumerate(first.outputs):
        (alone,) = llm.generate("abcd", SamplingParams(temperature=1.2, seed=3 + index, max_tokens=6))
        assert completion.token_ids == alone.outputs[0].token_ids
        assert completion.finish_reason == "length"
    assert [None if entry is None else len(entry) <= 2 for entry in first.prompt_logprobs] == [None, True, True, True]
    assert second.outputs[0].token_ids == expected("c")
    assert second.prompt_logprobs is None
    assert (first.request_id, first.prompt, first.finished) == ("0", "abcd", True)
    times = first.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time
    assert bench.engine.stats().prompt_tokens == 4 + 1 + 5 * 4
    with pytest.raises(RequestError, match="n=2: a stream has one answer"):
        llm.stream("abc", SamplingParams(n=2))


def test_more_answers_than_the_queue_holds(llm):
    (output,) = llm.generate("abc", SamplingParams(temperature=0, n=40, max_tokens=3))
    assert [each.token_ids for each in output.outputs] == [expected("abc", 3)] * 40


def test_tokens_asked_for_by_id(llm):
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[5, 7]))
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs):
        assert {5, 7} <= entry.keys()
        assert entry[token].rank == 1
        assert all(entry[each].rank is None for each in {5, 7} - {token})
        assert entry[5].decoded_token == LETTERS[5]


def test_cached_tokens_and_times_are_told(llm):
    prompt = "abcd" * PAGE_TOKENS
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    (again,) = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens > 0
    times = again.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time
    assert times.time_in_queue >= 0


def test_an_answer_is_shortened_to_the_context(llm):
    (output,) = llm.generate("ab" * 30, SamplingParams(temperature=0, max_tokens=100))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["abc", ""], None, r"prompts\[1\] is empty"),
        (["abc", [0, VOCAB]], None, rf"prompts\[1\]\[1\]={VOCAB} is not a token id"),
        (["abc", "a" * 64], None, r"prompts\[1\] has 64 tokens; the context holds 64"),
        (["abc", 3], None, r"prompts\[1\] is a int"),
        ([{"prompt": "x", "multi_modal_data": {"image": 1}}], None, "holds 'multi_modal_data', which is not supported"),
        ("a", SamplingParams(allowed_token_ids=[3], bad_words=["d"]), "leaves no token"),
        ("a", SamplingParams(logits_processors=["none"]), "no entry point .* is called 'none'"),
        ([{"text": "x"}], None, "neither 'prompt' nor 'prompt_token_ids'"),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries for 2 prompts"),
        ("a", {"temperature": 0}, r"\{'temperature': 0\} is no SamplingParams"),
        (["a", "b"], [GREEDY, SamplingParams(top_k=VOCAB + 1)], f"top_k={VOCAB + 1}"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(llm, bench, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not bench.engine.has_work
    assert bench.engine.stats().steps == 0


def test_stream_gives_the_same_text(llm):
    deltas = list(llm.stream("abc", GREEDY))
    assert "".join(delta.text for delta in deltas) == text(expected("abc"))
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert len(deltas) > 1


def test_a_stream_left_early_frees_its_place_and_others_go_on(llm, bench):
    left = llm.stream("abc", SamplingParams(temperature=0, max_tokens=50))
    kept = llm.stream("bcd", SamplingParams(temperature=0, max_tokens=10))
    next(left)
    start = next(kept).text
    # Another call in between steps the same engine; the open stream misses nothing.
    assert llm.generate("c", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].token_ids == expected("c", 20)
    left.close()
    assert start + "".join(delta.text for delta in kept) == text(expected("bcd", 10))
    while bench.engine.has_work:
        bench.engine.step()
    stats = bench.engine.stats()
    assert (stats.num_running, stats.pages_used, stats.finished["abort"]) == (0, 0, 1)


def test_an_interrupt_aborts_what_runs(llm, bench, monkeypatch):
    step, calls = bench.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(bench.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "bcd", "cde", "def", "efg", "fgh"], SamplingParams(temperature=0, max_tokens=50))
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == expected("abc")
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_failed_request_is_an_error():
    bench = Bench(poison=5)
    with letters_llm(bench) as llm:
        with pytest.raises(RequestError, match="request 0 failed: the model gave logits that are not finite"):
            llm.generate([5], GREEDY)
        assert llm.generate([6], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids == answer([6], 1)


def test_a_closed_llm_takes_no_prompts(llm):
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc")


def test_unknown_keywords_name_the_nearest():
    with pytest.raises(ConfigError, match=r"max_model_lenn=5: no such keyword of LLM; did you mean max_model_len\?"):
        LLM("smollm2", max_model_lenn=5)
    with pytest.raises(ConfigError, match=r"kv.page_tokens=3"):
        LLM("smollm2", block_size=3)
    with pytest.raises(ConfigError, match=r"kv.page_token.*did you mean kv.page_tokens"):
        LLM("smollm2", overrides="kv.page_token=16")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: not supported"):
        LLM("smollm2", trust_remote_code=True, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=2: not a share"):
        LLM("smollm2", gpu_memory_utilization=2)


def test_params_may_be_lists_or_one_string():
    assert SamplingParams(stop="x", stop_token_ids=[1]) == SamplingParams(stop=["x"], stop_token_ids=(1,))
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_the_whole_way_from_overrides_to_text():
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": "true",
        "hidden_act": "silu",
    }
    overrides = [
        "model=hf",
        "model.weights=dummy",
        "model.config={" + ",".join(f"{key}:{value}" for key, value in config.items()) + "}",
        "passes=reference",
        "hardware.threads=1",
        "kv.memory=1MiB",
    ]
    neutral = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "swap_space": 4, "seed": 0, "dtype": "float"}
    with LLM(overrides=overrides, max_model_len=64, enforce_eager=True, **neutral) as llm:
        prompts = ["hello", [1, 2, 3], "hello"]
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
        first, second, again = llm.generate(prompts, params)
        assert first.prompt_token_ids == list(b"hello")
        assert len(first.outputs[0].token_ids) == 6
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert second.outputs[0].text == llm.get_tokenizer().decode(second.outputs[0].token_ids)
        with pytest.raises(RequestError, match="the context holds 64"):
            llm.generate("x" * 64)


def test_salts_sessions_and_where_cached_tokens_were():
    with letters_llm(Bench()) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)

        def ask(prompt, **options):
            (output,) = llm.generate(prompt, params, **options)
            return output.num_cached_tokens, output.cached_tokens, output.missed_tokens

        text = "abcdefghij"
        assert ask(text) == (0, {}, {"cold": 10})
        assert ask(text)[:2] == (8, {"device": 8})
        assert ask({"prompt": text, "cache_salt": "tenant"}) == (0, {}, {"salt": 8, "cold": 2})
        session = SessionHint(id="s", pin_s=5)
        outputs = llm.generate([text, text], params, session=[session, None])
        assert [output.num_cached_tokens for output in outputs] == [8, 8]
        (nothing,) = llm.generate(text, params, session=SessionHint(id="s", prefetch=True))
        assert (nothing.outputs[0].text, nothing.outputs[0].finish_reason) == ("", "length")
        assert nothing.num_cached_tokens == 8
        with pytest.raises(RequestError, match="session has 1 entries for 2 prompts"):
            llm.generate([text, text], params, session=[session])
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate({"prompt": text, "cache_salt": ""}, params)
