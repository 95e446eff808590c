"""Bad words as tokens: what must not follow what, with a space before the word and without."""

from __future__ import annotations

import reprlib

from treadle.graph.packet import MAX_BAD_TOKENS, MAX_BAD_WORDS
from treadle.runtime.params import RequestError
from treadle.runtime.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...], vocab: int) -> tuple[tuple[int, ...], ...]:
    """Return the runs of tokens that spell ``words``, each once.

    A text that is tokenized otherwise than a word alone still holds it: as with every engine that works on tokens,
    words are found as they are usually written. Raises RequestError for words that are too long or too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        alone = tuple(tokenizer.encode(bare, add_special_tokens=False))
        behind = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        forms = [alone]
        # A space that is a token of its own makes no other word; one that is part of the first token does.
        if len(behind) == len(alone) and behind[:1] != alone[:1]:
            forms.append(behind)
        for form in forms:
            if not form or max(form) >= vocab:
                raise RequestError(f"bad_words: the model has no tokens for {reprlib.repr(word)}", "bad_words")
            if len(form) > MAX_BAD_TOKENS:
                raise RequestError(
                    f"bad_words: {reprlib.repr(word)} has {len(form)} tokens; a word takes at most {MAX_BAD_TOKENS}",
                    "bad_words",
                )
            found[form] = None
    several = sum(len(form) > 1 for form in found)
    if several > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words: {several} spellings have several tokens; at most {MAX_BAD_WORDS} may, any number may have one",
            "bad_words",
        )
    return tuple(found)
