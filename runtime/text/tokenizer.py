"""Text to token ids and back, over the ``tokenizers`` library. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import processors

from treadle.conf.errors import ConfigError


class TokenizerError(ConfigError):
    """A tokenizer that cannot be read: which file or key, what it holds, and what would work."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a checkpoint says about its tokenizer beside the vocabulary and the merges."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """any of them ends an answer"""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja source by name; the unnamed one is "default" """
    template_tokens: dict[str, str] = field(default_factory=dict)
    """what chat templates may name: bos_token, eos_token, ..."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """sampling parameters of requests that do not give them"""


class Tokenizer:
    """One vocabulary: encodes text, decodes ids, and knows the exact bytes of every token.

    Decoding joins the bytes of the tokens and reads them as UTF-8, so a text does not depend on how its tokens were
    grouped; bytes that are no UTF-8 read as U+FFFD.
    """

    def __init__(self, core: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self.core = core
        self.facts = facts
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._piece_bytes = _piece_decoder(core)
        self._bytes: dict[int, bytes] = {}

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self.facts.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self.facts.eos_ids

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, or None."""
        return self.facts.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; with ``add_special_tokens`` also those the model wants around it.

        A special token written out in ``text`` is read as that token. Other threads run meanwhile.
        """
        # The same ids as encode's, which keeps the interpreter's lock for as long as a prompt takes.
        ids: list[int] = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_at(
        self, text: str, places: Sequence[int], add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids of ``text``, and for each character index in ``places`` the index of the token that holds it.

        A place has none where no token comes from its character, such as the text's end; it is then left out.
        """
        found = self.core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        tokens = (found.char_to_token(place) for place in places)
        return found.ids, [token for token in tokens if token is not None]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids that no token has read as nothing."""
        skip: Collection[int] = self.special_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that a token adds to a text; empty for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        r"""Return one token alone, readable: its text, or ``bytes:\xf0\x9f`` where it is not whole UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self.core.token_to_id(token)
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._piece_bytes.added(added)
        piece: str | None = self.core.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return b"" if piece is None else self._piece_bytes(piece)


def surround(core: tokenizers.Tokenizer, before: Sequence[int], after: Sequence[int]) -> None:
    """Make ``core`` put the tokens ``before`` and ``after`` around every text that asks for special tokens."""
    # Under names of our own: the template syntax would misread a token that holds a colon or a dollar.
    around = {f"token{i}": token_id for i, token_id in enumerate((*before, *after))}
    names = list(around)
    core.post_processor = processors.TemplateProcessing(
        single=[*names[: len(before)], "$A", *names[len(before) :]],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [str(core.id_to_token(token_id))]}
            for name, token_id in around.items()
        ],
    )


def byte_characters() -> list[str]:
    """Return the printable character that byte-level vocabularies spell each of the 256 bytes with (GPT-2's map)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


class _ByteLevelPieces:
    """Spelling to bytes where every byte is one printable character."""

    def __init__(self) -> None:
        self._byte_of = {char: byte for byte, char in enumerate(byte_characters())}

    def __call__(self, piece: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in piece)
        except KeyError:  # a token that the vocabulary spells as plain text
            return piece.encode()

    def added(self, token: str) -> bytes:
        """Return the bytes of a token beside the merges, which is spelled as plain text."""
        return token.encode()


class _SentencePieces:
    """Spelling to bytes where U+2581 stands for a space and <0xE2> for a byte."""

    def __init__(self, replacements: Sequence[tuple[str, str]]) -> None:
        self._replacements = replacements

    def __call__(self, piece: str) -> bytes:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return self.added(piece)

    def added(self, token: str) -> bytes:
        """Return the bytes of a token beside the merges: some are runs of spaces, spelled as in the vocabulary."""
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _piece_decoder(core: tokenizers.Tokenizer) -> _ByteLevelPieces | _SentencePieces:
    """Return the map from a token's spelling to its bytes. Raises TokenizerError for a decoder that has none."""
    if core.decoder is None:
        raise TokenizerError("the tokenizer has no decoder; supported: ByteLevel, Replace + ByteFallback, Metaspace")
    state = json.loads(core.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    replacements: list[tuple[str, str]] = []
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                return _ByteLevelPieces()
            case "Replace" if "String" in step["pattern"]:
                replacements.append((step["pattern"]["String"], step["content"]))
            case "Metaspace":
                replacements.append((step["replacement"], " "))
            # Strip takes the space that encoding put before a whole text; an answer continues its prompt and keeps it.
            case "ByteFallback" | "Fuse" | "Strip":
                pass
            case unknown:
                raise TokenizerError(
                    f"decoder {unknown!r} of the tokenizer is unknown; supported: ByteLevel, "
                    "Replace + ByteFallback + Fuse + Strip, Metaspace"
                )
    return _SentencePieces(replacements)
