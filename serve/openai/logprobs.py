"""Log-probabilities in the shapes of the two generation endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.runtime.text.output import Alternative, Logprobs

FLOOR = -9999.0
"""JSON has no infinity; OpenAI sends this for a token that cannot be chosen"""


class CompletionLogprobs:
    """The four parallel lists of /v1/completions; remembers the text offset from one chunk to the next.

    ``by_id`` calls tokens ``token_id:5``, whatever their text.
    """

    def __init__(self, by_id: bool = False) -> None:
        self._by_id = by_id
        self._offset = 0

    def render(self, entries: Sequence[Logprobs] | None, first: Alternative | None = None) -> dict[str, Any] | None:
        """Return the object for the tokens of one chunk; ``first`` comes before them and has no log-probability."""
        if entries is None:
            return None
        chosen = [*(() if first is None else (first,)), *(entry.chosen for entry in entries)]
        offsets = []
        for one in chosen:
            offsets.append(self._offset)
            self._offset += len(one.text)
        none = [] if first is None else [None]
        top = [
            {_name(one, self._by_id): _finite(one) for one in _without_twins((*entry.top, *entry.asked, entry.chosen))}
            for entry in entries
        ]
        return {
            "tokens": [_name(one, self._by_id) for one in chosen],
            "token_logprobs": none + [_finite(entry.chosen) for entry in entries],
            "top_logprobs": none + top,
            "text_offset": offsets,
        }


def chat_logprobs(entries: Sequence[Logprobs] | None, by_id: bool = False) -> dict[str, Any] | None:
    """Return the object of /v1/chat/completions for some tokens; ``by_id`` calls them ``token_id:5``."""
    if entries is None:
        return None
    content = [
        _token(entry.chosen, by_id)
        | {"top_logprobs": [_token(one, by_id) for one in _without_twins((*entry.top, *entry.asked))]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Logprobs] | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's object for the tokens of a prompt, from the second on: None for the first, then id -> facts."""
    if entries is None:
        return None
    return [None, *(_by_token(entry) for entry in entries)]


def _by_token(entry: Logprobs) -> dict[str, Any]:
    ordered = _without_twins((entry.chosen, *entry.top, *entry.asked))
    return {
        str(one.token_id): {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.text} for one in ordered
    }


def _without_twins(ones: Sequence[Alternative]) -> list[Alternative]:
    """Return each token once, where it stands first."""
    return list({one.token_id: one for one in reversed(ones)}.values())[::-1]


def _token(one: Alternative, by_id: bool) -> dict[str, Any]:
    return {"token": _name(one, by_id), "logprob": _finite(one), "bytes": list(one.bytes)}


def _name(one: Alternative, by_id: bool) -> str:
    return f"token_id:{one.token_id}" if by_id else one.text


def _finite(one: Alternative) -> float:
    return max(one.logprob, FLOOR)
