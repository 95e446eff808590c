from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import tiny_tokenizer

from treadle.runtime.request import Abort, Output, Request, SamplingParams, TokenLogprob
from treadle.runtime.text.output import Delta, OutputProcessor

EOS = 2


def processor(**params):
    return OutputProcessor(
        tiny_tokenizer(), Request(id="r", prompt=[5], params=SamplingParams(**params), eos_ids=(EOS,))
    )


def output(ids, finish=None, **more):
    return Output(id="r", token_ids=list(ids), finish_reason=finish, **more)


def steps(ids, cuts, finish):
    """Return ``ids`` as Outputs cut at ``cuts``; the last one finishes."""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    chunks = [ids[a:b] for a, b in pairwise(bounds)] or [[]]
    return [output(chunk, finish if i == len(chunks) - 1 else None) for i, chunk in enumerate(chunks)]


def run(answer, outputs):
    deltas = []
    for item in outputs:
        deltas.append(answer.process(item))
        if answer.finished:
            break
    return deltas


def test_text_and_end_of_sequence():
    answer = processor()
    ids = tiny_tokenizer().encode("the quick fox")
    first = answer.process(output(ids, num_cached_tokens=16, queue_s=0.5))
    last = answer.process(output([EOS], "stop"))
    assert first.text + last.text == answer.text == "the quick fox"
    assert (last.finish_reason, last.stop_reason, last.abort) == ("stop", None, None)
    assert answer.token_ids == [*ids, EOS]
    assert (answer.num_cached_tokens, answer.queue_s) == (16, 0.5)


def test_a_stop_token_is_not_text_unless_asked():
    ids = tiny_tokenizer().encode("the dog")
    for include, expected in ((False, "the"), (True, "the dog")):
        answer = processor(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
        delta = answer.process(output(ids, "stop", stop_reason=ids[-1]))
        assert answer.text == expected
        assert delta.stop_reason == ids[-1]
        assert answer.token_ids == ids


def test_a_stop_string_asks_for_the_abort_and_drops_the_rest():
    ids = tiny_tokenizer().encode("ABC DEFGHIJ and more")
    answer = processor(stop="DEFGHIJ")
    deltas = run(answer, [output([i]) for i in ids])
    assert "".join(d.text for d in deltas) == "ABC "
    assert not any("D" in d.text for d in deltas)
    kept = len(answer.token_ids)
    assert tiny_tokenizer().decode(ids[:kept]).endswith("DEFGHIJ")
    assert "DEFGHIJ" not in tiny_tokenizer().decode(ids[: kept - 1])
    last = deltas[-1]
    assert last.abort == Abort(id="r", keep=kept)
    assert (last.finish_reason, last.stop_reason) == ("stop", "DEFGHIJ")
    assert answer.process(output(ids)) == Delta()
    assert answer.text == "ABC "


def test_a_stop_string_in_the_last_output_needs_no_abort():
    ids = tiny_tokenizer().encode("one two")
    answer = processor(stop=["two"], include_stop_str_in_output=True)
    delta = answer.process(output(ids, "length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.abort) == ("one two", "stop", "two", None)


def test_what_was_held_for_a_stop_comes_at_the_end():
    ids = tiny_tokenizer().encode("the DEF")
    answer = processor(stop="DEFG")
    assert answer.process(output(ids)).text == "the "
    assert answer.process(output([EOS], "stop")).text == "DEF"


def test_min_tokens_holds_for_stop_strings_too():
    ids = tiny_tokenizer().encode("x x x x")
    answer = processor(stop="x", min_tokens=len(ids))
    answer.process(output(ids))
    assert (answer.text, answer.finish_reason) == ("x x x ", "stop")


def test_a_code_point_cut_off_by_the_end_is_left_out():
    ids = tiny_tokenizer().encode("a 𝄫")
    answer = processor()
    answer.process(output(ids[:-1], "length"))
    assert answer.text == "a "


def test_special_tokens_are_text_only_when_asked():
    ids = [1, *tiny_tokenizer().encode("the"), EOS]
    assert processor().process(output(ids, "length")).text == "the"
    shown = processor(skip_special_tokens=False)
    assert shown.process(output(ids, "length")).text == "<|im_start|>the<|im_end|>"


def test_logprobs_carry_exact_bytes_and_ranks():
    ids = tiny_tokenizer().encode("𝄫")
    found = [TokenLogprob(-0.5, 2, [7, i], [-0.25, -0.5]) for i in ids]
    answer = processor(logprobs=2)
    delta = answer.process(Output(id="r", token_ids=ids, logprobs=found))
    assert b"".join(entry.chosen.bytes for entry in delta.logprobs) == "𝄫".encode()
    assert [(a.token_id, a.rank, a.logprob) for a in delta.logprobs[0].top] == [(7, 1, -0.25), (ids[0], 2, -0.5)]
    assert delta.logprobs[0].chosen.text.startswith("bytes:\\xf0")
    assert answer.cumulative_logprob == pytest.approx(-0.5 * len(ids))


def test_logprobs_of_asked_tokens_and_of_the_prompt():
    answer = OutputProcessor(
        tiny_tokenizer(),
        Request(id="r", prompt=[5, 6, 7], params=SamplingParams(logprob_token_ids=[9, 8], prompt_logprobs=1)),
    )
    found = [TokenLogprob(-0.5, 2, [], [], [-3.0, -4.0])]
    of_prompt = [TokenLogprob(-1.0, 4, [3], [-0.5]), TokenLogprob(-2.0, 1, [7], [-2.0])]
    delta = answer.process(Output(id="r", token_ids=[5], logprobs=found, prompt_logprobs=of_prompt))
    assert [(a.token_id, a.rank, a.logprob) for a in delta.logprobs[0].asked] == [(9, None, -3.0), (8, None, -4.0)]
    assert [(p.chosen.token_id, p.chosen.logprob, p.chosen.rank) for p in delta.prompt_logprobs] == [
        (6, -1.0, 4),
        (7, -2.0, 1),
    ]
    assert answer.cumulative_logprob == pytest.approx(-0.5)
    last = answer.process(Output(id="r", token_ids=[6], logprobs=found, finish_reason="length"))
    assert last.prompt_logprobs is None
    assert answer.prompt_logprobs == delta.prompt_logprobs


def test_without_detokenizing_there_is_no_text():
    answer = processor(detokenize=False)
    delta = answer.process(output(tiny_tokenizer().encode("the dog"), "length"))
    assert (delta.text, answer.text, delta.finish_reason) == ("", "", "length")
    assert len(delta.token_ids) == len(answer.token_ids) > 0


def test_logprobs_stop_with_the_stop_string():
    ids = tiny_tokenizer().encode("the END of")
    answer = processor(logprobs=0, stop="END")
    found = [TokenLogprob(-1.0, 1, [], []) for _ in ids]
    delta = answer.process(Output(id="r", token_ids=ids, logprobs=found))
    assert len(delta.logprobs) == len(delta.token_ids) == len(answer.logprobs) < len(ids)


def test_an_error_is_passed_on():
    delta = processor().process(output([], "error", error="out of pages"))
    assert (delta.finish_reason, delta.error) == ("error", "out of pages")


TOKENS = st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=10)
STOPS = st.lists(st.sampled_from(["the", " ", "e", "👩🏽‍🚀", "\ufffd", "qu", "é", "ick b"]), max_size=3)


@given(TOKENS, CUTS, CUTS, STOPS, st.booleans(), st.integers(0, 10), st.sampled_from(["stop", "length"]))
def test_the_split_into_steps_never_matters(ids, cuts, other_cuts, stops, include, min_tokens, finish):
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    results = []
    for cut in (cuts, other_cuts, [], range(31)):
        answer = processor(**params)
        deltas = run(answer, steps(ids, cut, finish))
        assert "".join(d.text for d in deltas) == answer.text
        assert [i for d in deltas for i in d.token_ids] == answer.token_ids
        results.append((answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    assert all(result == results[0] for result in results)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), CUTS)
def test_the_stream_joins_to_the_text(text, cuts):
    ids = tiny_tokenizer().encode(text)
    answer = processor(skip_special_tokens=False)
    deltas = run(answer, steps([*ids, EOS], cuts, "stop"))
    assert "".join(d.text for d in deltas) == text
