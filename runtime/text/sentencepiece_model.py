"""A tokenizer.model file: SentencePiece's protobuf message, read without its package.

Source: sentencepiece_model.proto, and the wire format of protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from treadle.runtime.text.sentencepiece import NORMAL, SentencePieces
from treadle.runtime.text.tokenizer import TokenizerError

_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def sentence_pieces(path: Path, legacy: bool = True) -> tuple[tokenizers.Tokenizer, SentencePieces]:
    """Return the tokenizer of a tokenizer.model file, its control tokens added, and its vocabulary.

    ``legacy``: text that follows a token beside the merges begins as if a space stood before it.

    Raises: TokenizerError if the file is none, or its model cuts words or characters.
    """
    try:
        vocabulary, kind = _read(path.read_bytes(), legacy)
    except OSError as error:
        raise TokenizerError(f"cannot be read: {error.strerror}", key=str(path)) from None
    except (IndexError, ValueError, struct.error) as error:
        raise TokenizerError(f"not a SentencePiece model, or a truncated one: {error}", key=str(path)) from None
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(
            f"a SentencePiece model of type {kind}",
            key=str(path),
            hint="types that can be read: unigram (1), BPE (2)",
        )
    core = vocabulary.by_merges() if kind == _BPE else vocabulary.by_likelihood()
    vocabulary.add_tokens(core)
    return core, vocabulary


def _read(raw: bytes, legacy: bool) -> tuple[SentencePieces, int]:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    kind, charsmap, add_space, join_spaces, escape = _UNIGRAM, b"", True, True, True
    for number, value in _fields(raw):
        if not isinstance(value, bytes):
            continue
        inner = dict(_fields(value)) if number in (1, 2, 3) else {}
        match number:
            case 1:
                pieces.append(_text(inner.get(1, b"")))
                scores.append(struct.unpack("<f", _raw(inner.get(2, b"\0\0\0\0")))[0])
                types.append(_int(inner.get(3, NORMAL)))
            case 2:
                kind = _int(inner.get(3, _UNIGRAM))
            case 3:
                charsmap = _raw(inner.get(2, b""))
                add_space, join_spaces, escape = (bool(_int(inner.get(field, 1))) for field in (3, 4, 5))
    if not pieces:
        raise ValueError("no pieces")
    if not escape:
        raise ValueError("spaces that stay spaces are not supported")
    vocabulary = SentencePieces(
        pieces=pieces,
        scores=scores,
        types=types,
        add_space=add_space,
        space_after_tokens=legacy,
        join_spaces=join_spaces,
        charsmap=charsmap,
    )
    return vocabulary, kind


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: their number, and an int or the bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(raw, at)
            yield number, value
            continue
        if wire not in (_BYTES, _FIXED32, _FIXED64):
            raise ValueError(f"field {number} has wire type {wire}")
        length, at = _varint(raw, at) if wire == _BYTES else (4 if wire == _FIXED32 else 8, at)
        if at + length > len(raw):
            raise ValueError(f"field {number} ends behind the file")
        yield number, raw[at : at + length]
        at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _text(value: int | bytes) -> str:
    return _raw(value).decode("utf-8")


def _raw(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes stand where a number belongs")
    return value
