"""Log-probabilities in the shapes of the two generation endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.runtime.text.output import Alternative, Logprobs

FLOOR = -9999.0
"""JSON has no infinity; OpenAI sends this for a token that cannot be chosen"""


class CompletionLogprobs:
    """The four parallel lists of /v1/completions; remembers the text offset from one chunk to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def render(self, entries: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        """Return the object for the tokens of one chunk."""
        if entries is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.chosen.text)
        return {
            "tokens": [entry.chosen.text for entry in entries],
            "token_logprobs": [_finite(entry.chosen) for entry in entries],
            "top_logprobs": [
                {one.text: _finite(one) for one in dict.fromkeys((*entry.top, entry.chosen))} for entry in entries
            ],
            "text_offset": offsets,
        }


def chat_logprobs(entries: Sequence[Logprobs] | None) -> dict[str, Any] | None:
    """Return the object of /v1/chat/completions for some tokens."""
    if entries is None:
        return None
    return {
        "content": [_token(entry.chosen) | {"top_logprobs": [_token(one) for one in entry.top]} for entry in entries],
        "refusal": None,
    }


def _token(one: Alternative) -> dict[str, Any]:
    return {"token": one.text, "logprob": _finite(one), "bytes": list(one.bytes)}


def _finite(one: Alternative) -> float:
    return max(one.logprob, FLOOR)
