"""Words to the runs of tokens that spell them."""

from __future__ import annotations

import pytest
from tiny_text import tiny_tokenizer

from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS
from treadle.runtime.params import RequestError
from treadle.runtime.text.bad_words import bad_word_ids

VOCAB = 10_000


def test_a_word_is_found_at_the_start_and_behind_a_space() -> None:
    tokenizer = tiny_tokenizer()
    bare, spaced = tokenizer.encode("the", False), tokenizer.encode(" the", False)
    assert len(bare) == len(spaced) == 1
    assert bare != spaced
    assert bad_word_ids(tokenizer, ("the", " the"), VOCAB) == (tuple(bare), tuple(spaced))


def test_a_space_of_its_own_makes_no_other_word() -> None:
    tokenizer = tiny_tokenizer()
    word = tuple(tokenizer.encode("zzz", False))
    assert len(tokenizer.encode(" zzz", False)) > len(word) > 1
    assert bad_word_ids(tokenizer, ("zzz",), VOCAB) == (word,)


@pytest.mark.parametrize(
    ("words", "vocab", "message"),
    [
        (("z" * (MAX_BAD_TOKENS + 1),), VOCAB, f"at most {MAX_BAD_TOKENS}"),
        (tuple(f"{i:02}x" for i in range(MAX_BAD_WORDS + 1)), VOCAB, f"at most {MAX_BAD_WORDS} may"),
        (("the",), 10, "no tokens for 'the'"),
    ],
)
def test_what_no_slot_holds_is_refused(words: tuple[str, ...], vocab: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        bad_word_ids(tiny_tokenizer(), words, vocab)
    assert caught.value.field == "bad_words"
