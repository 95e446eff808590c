"""A prompt and its parameters to the Request that the step loop takes. Every refusal happens here, before it runs."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from treadle.runtime.processors import check_processors
from treadle.runtime.request import Request, RequestError, SamplingParams, SessionHint, check_cache, check_choice
from treadle.runtime.text.bad_words import bad_word_ids
from treadle.runtime.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class PromptParts(NamedTuple):
    """A prompt: its text or its ids, and what else came with it."""

    text: str | None
    ids: Sequence[int] | None
    cache_salt: str | None = None
    seams: Sequence[int] = ()
    """places in the text, in characters, where a later prompt may part from it"""


SUSPECT_CHARS = 8
"""characters a token of a text that is counted in slices before it is tokenized whole"""
SLICE_CHARS = 1 << 16

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the deployment holds: tokens of one sequence (prompt and answer) and ids the model knows."""

    max_len: int
    vocab: int
    boundaries: bool = False
    """whether the engine has a use for ``Request.boundaries``"""


def prepare(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams,
    limits: Limits,
    *,
    request_id: str,
    add_special_tokens: bool = True,
    clamp: bool = False,
    field: str = "prompt",
    cache_salt: str | None = None,
    session: SessionHint | None = None,
    seams: Sequence[int] = (),
) -> Request:
    """Return the request for ``prompt``, with ``max_tokens`` resolved; ``request.spread`` makes ``n`` of it.

    ``clamp`` shortens an answer that would not fit in the context instead of refusing it. ``field`` is what the caller
    calls the prompt, for messages. ``seams`` are character indices of a text where a later prompt may part from it.
    Raises RequestError naming the field, its value and the limit.
    """
    params = params.typed()
    params.check(limits.vocab)
    check_processors(params.logits_processors)
    keep = _kept_tokens(params, limits)
    ids, boundaries = _prompt_ids(tokenizer, prompt, limits, add_special_tokens, field, keep, seams)
    if not ids:
        raise RequestError(f"{field} is empty; it takes at least one token", field)
    room = limits.max_len - len(ids)
    if params.max_tokens is None or (clamp and params.max_tokens > room):
        params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    elif params.max_tokens > room:
        raise RequestError(
            f"max_tokens={params.max_tokens} and the {len(ids)} tokens of {field} exceed the context of "
            f"{limits.max_len} tokens; max_tokens takes at most {room} here",
            "max_tokens",
        )
    eos_ids = tuple(token_id for token_id in tokenizer.eos_ids if token_id < limits.vocab)
    request = Request(
        id=request_id,
        prompt=ids,
        params=params,
        eos_ids=eos_ids,
        bad_token_ids=bad_word_ids(tokenizer, params.bad_words, limits.vocab),
        cache_salt=cache_salt,
        boundaries=boundaries,
        session=session,
        arrival_s=time.monotonic(),
    )
    check_choice(request)
    check_cache(request)
    return request


def many_parts(prompts: Prompt | Sequence[Prompt]) -> list[PromptParts]:
    """Return the parts of each prompt, of one or of many; a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompt_parts(prompts, "prompts[0]")]
    return [prompt_parts(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def prompt_parts(prompt: Any, field: str) -> PromptParts:
    """Return the parts of a prompt in any form. Raises RequestError naming ``field``."""
    salt = None
    if isinstance(prompt, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not keys:
            raise RequestError(f"{field} has neither 'prompt' nor 'prompt_token_ids'", field)
        for key, value in prompt.items():
            known = key in ("prompt_token_ids", "prompt", "cache_salt")
            if not known and value is not None and value != {}:
                raise RequestError(f"{field} holds {key!r}, which is not supported; it takes text or token ids", field)
        prompt, salt = prompt[keys[0]], prompt.get("cache_salt")
    if isinstance(prompt, str):
        return PromptParts(prompt, None, salt)
    if isinstance(prompt, Sequence):
        return PromptParts(None, prompt, salt)
    raise RequestError(f"{field} is a {type(prompt).__name__}, not text, token ids or a dict of either", field)


def _kept_tokens(params: SamplingParams, limits: Limits) -> int | None:
    """Return how many of a prompt's last tokens are kept at most, None if a longer prompt is refused."""
    keep = params.truncate_prompt_tokens
    if keep == -1:
        return max(limits.max_len - (params.max_tokens or 1), 1)
    if keep is not None and keep >= limits.max_len:
        raise RequestError(
            f"truncate_prompt_tokens={keep} is more than fits; it takes at most {limits.max_len - 1}",
            "truncate_prompt_tokens",
        )
    return keep


def _prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    limits: Limits,
    add_special_tokens: bool,
    field: str,
    keep: int | None,
    seams: Sequence[int],
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids of a prompt, and the token boundaries of ``seams`` inside it, ascending."""
    if isinstance(prompt, str):
        encoded, boundaries = _encode(tokenizer, prompt, limits, add_special_tokens, field, keep, seams)
        # Some vocabularies hold tokens that the model has no embedding for.
        if encoded and max(encoded) >= limits.vocab:
            token = tokenizer.token_text(max(encoded))
            raise RequestError(f"{field} holds {token!r}, a token that the model does not know", field)
        return encoded, boundaries
    prompt = prompt if keep is None else prompt[-keep:]
    if len(prompt) >= limits.max_len:
        raise _too_long(len(prompt), limits, field)
    ids = list(prompt)
    for i, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < limits.vocab:
            found = reprlib.repr(token_id)
            raise RequestError(f"{field}[{i}]={found} is not a token id in [0, {limits.vocab})", field)
    return ids, ()


def _encode(
    tokenizer: Tokenizer,
    text: str,
    limits: Limits,
    add_special_tokens: bool,
    field: str,
    keep: int | None,
    seams: Sequence[int],
) -> tuple[list[int], tuple[int, ...]]:
    """Return ids and boundaries of ``text``, with work and memory bounded by the context and not by the text."""

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens)

    if len(text) > SUSPECT_CHARS * limits.max_len:
        # A cut changes the tokens next to it only, so twice too many tokens in slices are too many in one piece.
        count = 0
        for end in range(len(text), 0, -SLICE_CHARS):
            start = max(end - SLICE_CHARS, 0)
            count += len(encode(text[start:end]))
            if count > 2 * limits.max_len:
                if keep is None:
                    raise _too_long(None, limits, field)
                text, seams = text[start:], [seam - start for seam in seams if seam >= start]
                break
    ids, boundaries = tokenizer.encode_at(text, seams, add_special_tokens) if seams else (encode(text), [])
    left_out = 0 if keep is None else max(len(ids) - keep, 0)
    ids = ids[left_out:]
    if len(ids) >= limits.max_len:
        raise _too_long(len(ids), limits, field)
    return ids, tuple(sorted({at - left_out for at in boundaries if left_out < at < left_out + len(ids)}))


def _too_long(count: int | None, limits: Limits, field: str) -> RequestError:
    found = f"{count}" if count is not None else f"more than {limits.max_len}"
    return RequestError(
        f"{field} has {found} tokens; the context holds {limits.max_len}, "
        f"so a prompt takes at most {limits.max_len - 1}",
        field,
    )
