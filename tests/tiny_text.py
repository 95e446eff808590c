"""A tiny byte-level vocabulary in every form in which a checkpoint may bring one."""

from __future__ import annotations

import json
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
