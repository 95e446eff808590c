"""Tokens to text as they arrive: whole code points only, and no part of a stop string."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from treadle.runtime.text.tokenizer import Tokenizer


class Match(NamedTuple):
    """A stop string and where it lies in the text that was searched: [start, end)."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Holds back text that can still become a stop string.

    The stop that ends first wins, and of those the one that starts first: what a reader of single characters would
    see, so that the answer does not depend on how text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    @property
    def held(self) -> str:
        """The text that was fed and neither given out nor matched yet."""
        return self._held

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, Match | None]:
        """Take new text; return what is certain, and the match that ends it (then nothing is held any more).

        With ``may_stop`` false a stop that ends inside ``text`` does not count; one that ends later still does.
        The certain text before a match does not hold the stop itself.
        """
        if not self._stops:
            return text, None
        searched = self._held + text
        match = self._find(searched) if may_stop else None
        if match is not None:
            self._held = ""
            return searched[: match.start], match
        certain = len(searched) - self._possible_start(searched)
        self._held = searched[certain:]
        return searched[:certain], None

    def flush(self) -> str:
        """Return what was held back; no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, searched: str) -> Match | None:
        best: Match | None = None
        for stop in self._stops:
            # Only a stop that ends in the new text: an earlier one was taken or was not allowed to count.
            start = searched.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start < 0:
                continue
            found = Match(stop, start, start + len(stop))
            if best is None or (found.end, found.start) < (best.end, best.start):
                best = found
        return best

    def _possible_start(self, searched: str) -> int:
        """Return the length of the longest suffix that is the beginning of a stop."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(searched)), longest, -1):
                if searched.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Detokenizer:
    """Bytes of tokens to text, whole code points only.

    Joined, the pieces equal ``Tokenizer.decode`` of all tokens however they were grouped, except that a code point
    cut off by the end of the answer is left out rather than shown as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that has become certain with this token."""
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))
