import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import piece_tokenizer, tiny_tokenizer

from treadle.runtime.text.detokenizer import Detokenizer, StopStrings

TOKENS = st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=40)


def test_no_part_of_a_code_point_is_shown():
    tokenizer = tiny_tokenizer()
    text = "Repeat: 👩🏽‍🚀 龘 𝄞 é 🧑🏿‍🔧 鱻 𝄢 ø"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some code points took several tokens


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_pieces_join_to_the_text(text):
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text


@given(TOKENS, st.booleans())
def test_any_tokens_join_to_what_decode_gives(ids, skip):
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, skip)
    joined = "".join(detokenizer.feed(i) for i in ids)
    whole = tokenizer.decode(ids, skip)
    assert whole == joined or (whole.startswith(joined) and whole[len(joined) :] == "\ufffd")


@pytest.mark.parametrize("kind", ["llama", "t5"])
@given(st.data())
def test_bytes_of_any_pieces_join_to_what_decode_gives(kind, data):
    tokenizer = piece_tokenizer(kind)
    # Bytes that begin, continue and break code points, beside whole pieces.
    likely = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in (0x41, 0x80, 0xA9, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0x9F)]
    ids = data.draw(st.lists(st.sampled_from(likely) | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip)
        joined, whole = "".join(detokenizer.feed(i) for i in ids), tokenizer.decode(ids, skip)
        assert whole == joined or (whole.startswith(joined) and whole[len(joined) :] == "\ufffd")


@pytest.mark.parametrize("kind", ["llama", "t5"])
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_valid_text_streams_whole_through_byte_fallback(kind, text):
    tokenizer = piece_tokenizer(kind)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_a_literal_replacement_character_is_not_held():
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.feed(i) for i in tokenizer.encode("\ufffd")) == "\ufffd"


def run(stops, pieces):
    """Return the text given out, the stop that matched and the index of the piece it ended in."""
    finder, out = StopStrings(tuple(stops)), []
    for i, piece in enumerate(pieces):
        certain, match = finder.feed(piece)
        out.append(certain)
        if match is not None:
            return "".join(out), match.stop, i
    return "".join(out) + finder.flush(), None, None


def test_a_stop_that_spans_pieces_never_leaks():
    finder = StopStrings(("DEFGHIJ",))
    given_out = []
    for piece in ["ABC", " ", "DE", "FGH", "IJ", "KL"]:
        certain, match = finder.feed(piece)
        given_out.append(certain)
        if match:
            break
    assert given_out == ["ABC", " ", "", "", ""]
    assert match.stop == "DEFGHIJ"


def test_what_cannot_become_a_stop_is_given_out_at_once():
    finder = StopStrings(("abcd", "xyz"))
    assert finder.feed("abc") == ("", None)
    assert finder.feed("abcx")[0] == "abcabc"
    assert finder.feed("q") == ("xq", None)
    assert finder.held == ""


def test_the_stop_that_ends_first_wins_and_then_the_longest():
    assert run(["abc", "b"], ["abc"]) == ("a", "b", 0)
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc", 0)
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab", 3)


def test_a_stop_that_ends_too_early_does_not_count():
    finder = StopStrings(("ab",))
    assert finder.feed("xab", may_stop=False) == ("xab", None)
    assert finder.feed("a", may_stop=False) == ("", None)
    certain, match = finder.feed("b")
    assert (certain, match.stop) == ("", "ab")


AB = st.text(alphabet="ab", min_size=1, max_size=5)


@given(st.lists(AB, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_the_split_into_pieces_never_matters(stops, pieces):
    text, stop, at = run(stops, pieces)
    single, single_stop, last = run(stops, list("".join(pieces)))
    assert (text, stop) == (single, single_stop)
    assert not any(s in text for s in stops)
    if stop is None:
        assert text == "".join(pieces)
    else:
        assert "".join(pieces).startswith(text + stop)
        # The match is told with the piece that completes it.
        assert len("".join(pieces[:at])) < last + 1 <= len("".join(pieces[: at + 1]))


@given(st.lists(AB, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_only_the_beginning_of_a_stop_is_held(stops, pieces):
    finder = StopStrings(tuple(stops))
    for piece in pieces:
        _, match = finder.feed(piece)
        if match:
            assert finder.held == ""
            break
        assert finder.held == "" or any(s.startswith(finder.held) for s in stops)
