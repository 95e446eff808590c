import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import tiny_tokenizer

from treadle.runtime.request import RequestError, SamplingParams, SessionHint
from treadle.runtime.text.prompt import Limits, many_parts, prepare

LIMITS = Limits(max_len=32, vocab=400)


def make(prompt, limits=LIMITS, **options):
    names = SamplingParams.__struct_fields__
    params = SamplingParams(**{key: value for key, value in options.items() if key in names})
    rest = {key: value for key, value in options.items() if key not in names}
    return prepare(tiny_tokenizer(), prompt, params, limits, request_id="r", **rest)


def test_text_and_ids_become_the_same_request():
    ids = tiny_tokenizer().encode("the dog")
    by_text, by_ids = make("the dog"), make(tuple(ids))
    assert by_text.prompt == by_ids.prompt == ids
    assert by_text.eos_ids == (2, 0)
    assert by_text.arrival_s > 0


def test_max_tokens_left_open_takes_the_rest_of_the_context():
    assert make([5, 6], max_tokens=None).params.max_tokens == 30


def test_an_answer_that_does_not_fit_is_refused_or_shortened():
    with pytest.raises(
        RequestError, match=r"max_tokens=31 and the 2 tokens of prompt .* 32 tokens; .* at most 30"
    ) as caught:
        make([5, 6], max_tokens=31)
    assert caught.value.field == "max_tokens"
    shortened = make([5, 6], max_tokens=31, min_tokens=31, clamp=True).params
    assert (shortened.max_tokens, shortened.min_tokens) == (30, 30)


@pytest.mark.parametrize(
    ("prompt", "options", "field", "message"),
    [
        ([], {}, "prompt", "prompt is empty"),
        ("", {"field": "messages"}, "messages", "messages is empty"),
        ([5] * 32, {}, "prompt", "prompt has 32 tokens; the context holds 32, so a prompt takes at most 31"),
        ([None] * 10**6, {}, "prompt", "prompt has 1000000 tokens"),
        ("x" * 10**6, {}, "prompt", "prompt has more than 32 tokens; the context holds 32"),
        ([5, "y" * 10**6], {}, "prompt", r"prompt\[1\]='y{12}\.\.\.y{13}' is not"),
        ([5, 400], {}, "prompt", r"prompt\[1\]=400 is not a token id in \[0, 400\)"),
        ([5, -1], {}, "prompt", r"prompt\[1\]=-1"),
        ([True], {}, "prompt", r"prompt\[0\]=True"),
        ([1.5], {}, "prompt", r"prompt\[0\]=1.5"),
        ([5], {"temperature": -1}, "temperature", "temperature=-1"),
        ([5], {"temperature": float("nan")}, "temperature", "temperature=nan"),
        ([5], {"top_p": 0}, "top_p", "top_p=0"),
        ([5], {"top_k": 1.5}, "top_k", "top_k"),
        ([5], {"stop": [""]}, "stop", "stop takes"),
        ([5], {"stop": [3]}, "stop", "stop"),
        ([5], {"stop_token_ids": [400]}, "stop_token_ids", "stop_token_ids holds 400"),
        ([5], {"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ([5], {"max_tokens": "x"}, "max_tokens", "max_tokens"),
        ([5], {"logprobs": 21}, "logprobs", "logprobs=21"),
    ],
)
def test_refusals_name_the_field_and_the_limit(prompt, options, field, message):
    with pytest.raises(RequestError, match=message) as caught:
        make(prompt, **options)
    assert caught.value.field == field


def test_text_with_a_token_beyond_the_model_is_refused():
    with pytest.raises(RequestError, match=r"prompt holds '<\|im_end\|>', a token that the model does not know"):
        make("<|im_end|>", Limits(max_len=32, vocab=2))


def test_special_tokens_can_be_left_to_the_caller():
    assert make("<|im_start|>the", add_special_tokens=False).prompt[0] == 1


def test_ends_outside_the_models_vocabulary_are_left_out():
    assert make([1], Limits(max_len=32, vocab=2)).eos_ids == (0,)


@given(st.text(st.sampled_from("the quick 12é龘👩\u200d\n'<|im_end|>"), max_size=60), st.booleans())
def test_ids_are_those_of_the_whole_text(text, special):
    request = make(f"x{text}", Limits(max_len=1000, vocab=400), add_special_tokens=special)
    assert request.prompt == tiny_tokenizer().encode(f"x{text}", special)


def test_a_text_of_few_tokens_may_be_long():
    limits = Limits(max_len=50_000, vocab=400)
    text = "<|endoftext|>" * 40_000  # 13 characters a token, over many slices
    assert make(text, limits).prompt == [0] * 40_000
    with pytest.raises(RequestError, match="60000 tokens"):
        make("<|endoftext|>" * 60_000, limits)


def test_other_threads_run_meanwhile():
    limits = Limits(max_len=1 << 20, vocab=400)
    worker = threading.Thread(target=make, args=("the quick brown fox " * 50_000, limits))
    worker.start()
    gaps, last_s = [], time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        now_s = time.perf_counter()
        gaps.append(now_s - last_s)
        last_s = now_s
    assert len(gaps) > 20
    assert max(gaps) < sum(gaps) / 2


def test_only_the_last_tokens_are_kept_when_asked():
    ids = tiny_tokenizer().encode("the quick brown fox " * 20)
    assert make(ids, truncate_prompt_tokens=5).prompt == ids[-5:]
    assert make("the quick brown fox " * 20, truncate_prompt_tokens=5).prompt == ids[-5:]
    assert make(ids[:3], truncate_prompt_tokens=5).prompt == ids[:3]
    assert make(ids, truncate_prompt_tokens=-1, max_tokens=12).prompt == ids[-20:]
    assert make(ids, truncate_prompt_tokens=-1, max_tokens=None).params.max_tokens == 1
    assert make("fox " * 10**5, truncate_prompt_tokens=8).prompt == tiny_tokenizer().encode("fox " * 50)[-8:]
    with pytest.raises(RequestError, match="truncate_prompt_tokens=32 is more than fits; it takes at most 31"):
        make(ids, truncate_prompt_tokens=32)


def test_bad_words_travel_as_tokens():
    request = make([5], bad_words=["the"])
    assert request.bad_token_ids[0] == tuple(tiny_tokenizer().encode("the", False))
    assert make([5]).bad_token_ids == ()


def test_a_prompt_may_bring_its_salt():
    prompts = [{"prompt": "a", "cache_salt": "t"}, {"prompt_token_ids": [1]}, "b", [2, 3]]
    expected = [("a", None, "t", ()), (None, [1], None, ()), ("b", None, None, ()), (None, [2, 3], None, ())]
    assert many_parts(prompts) == expected
    assert make("a", cache_salt="t").cache_salt == "t"
    with pytest.raises(RequestError, match="'multi_modal_data', which is not supported"):
        many_parts([{"prompt": "a", "multi_modal_data": {"image": 1}}])


@pytest.mark.parametrize("special", [True, False])
def test_boundaries_are_where_the_seams_tokens_begin(special):
    text = "the quick brown fox jumps over the lazy dog"
    limits = Limits(max_len=100, vocab=400)
    whole = make(text, limits, add_special_tokens=special)
    tokenizer = tiny_tokenizer()
    seams = [text.index(word) for word in ("jumps", "quick", "jumps")]
    request = make(text, limits, add_special_tokens=special, seams=[*seams, len(text), 0])
    assert request.prompt == whole.prompt
    heads = [tokenizer.decode(request.prompt[:at]) for at in request.boundaries]
    # A token with the space before the word belongs to what follows.
    assert heads == ["the", "the quick brown fox"]
    kept = make(text, limits, add_special_tokens=special, seams=seams, truncate_prompt_tokens=len(whole.prompt) - 2)
    assert kept.prompt == whole.prompt[2:]
    assert list(kept.boundaries) == [at - 2 for at in request.boundaries if at > 2]


def test_seams_of_a_text_that_is_cut_before_it_is_tokenized():
    limits = Limits(max_len=100, vocab=400)
    text = "x" * 300_000 + " the dog"
    request = make(text, limits, truncate_prompt_tokens=50, max_tokens=4, seams=[5, len(text) - 3])
    assert len(request.prompt) == 50
    assert [tiny_tokenizer().decode(request.prompt[at:]) for at in request.boundaries] == [" dog"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"session": "s"}, "session"),
        ({"session": SessionHint(id="s", prefetch=True), "n": 2}, "n"),
        ({"session": SessionHint(id="s", prefetch=True), "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_no_cache_can_do_is_refused(options, field):
    with pytest.raises(RequestError) as caught:
        make([5], **options)
    assert caught.value.field == field
