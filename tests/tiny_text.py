"""A tiny byte-level vocabulary in every form in which a checkpoint may bring one."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from treadle.runtime.text.tokenizer import Tokenizer
from treadle.runtime.text.vocabulary import tokenizer_from_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs don't",
    "def f(x):\n    return x ** 2\n",
    "привет мир, 日本語のテキスト 👩🏽‍🚀 龘 𝄞 é naïve 12345 67890",
] * 4


@lru_cache
def trained() -> str:
    """Return the JSON of a byte-level BPE tokenizer with every byte in its alphabet and digits split."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core.to_str()


def gguf_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """Return the tokenizer keys that a GGUF file of this vocabulary has."""
    model = json.loads(trained())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in SPECIALS else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """Return the tokenizer, rebuilt from GGUF metadata."""
    return tokenizer_from_gguf(gguf_metadata())


def write_directory(directory: Path, **config: Any) -> Path:
    """Write a Hugging Face-layout tokenizer; ``config`` goes into tokenizer_config.json."""
    core = tokenizers.Tokenizer.from_str(trained())
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    core.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": TEMPLATE,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


PIECES = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁", "a", "b", "ab", "▁ab", "bb", "▁▁", "<tool>", "é", "本"),
]
"""A SentencePiece vocabulary: unknown, control, bytes, pieces in the order in which they merge, one user-defined."""
PIECE_TYPES = [2, 3, 3, *[6] * 256, *[1] * 7, 4, 1, 1]
PIECE_SCORES = [*[0.0] * 259, *(-float(i) for i in range(10))]


def piece_metadata(model: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return the tokenizer keys of a GGUF file with a SentencePiece vocabulary."""
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": PIECE_SCORES,
        "tokenizer.ggml.token_type": PIECE_TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }


@lru_cache
def piece_tokenizer(model: str = "llama") -> Tokenizer:
    """Return a tokenizer with byte fallback, by merges (``llama``) or by likelihood (``t5``)."""
    return tokenizer_from_gguf(piece_metadata(model))


def model_proto(kind: int, *, add_space: bool = True, join_spaces: bool = False) -> bytes:
    """Return a tokenizer.model file of PIECES: SentencePiece's message, ``kind`` 1 by likelihood, 2 by merges."""

    def varint(value: int) -> bytes:
        low, rest = value & 0x7F, value >> 7
        return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])

    def block(field: int, content: bytes) -> bytes:
        return varint(field << 3 | 2) + varint(len(content)) + content

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    message = b""
    for piece, score, type_ in zip(PIECES, PIECE_SCORES, PIECE_TYPES):
        inner = block(1, piece.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        message += block(1, inner + (number(3, type_) if type_ != 1 else b""))
    # Fields that nobody here reads stand between: a name, and a vocabulary size.
    message += block(2, block(2, b"tokenizer") + number(3, kind) + number(4, len(PIECES)))
    return message + block(3, block(1, b"identity") + number(3, add_space) + number(4, join_spaces))
