"""The tokenizer that belongs to a checkpoint, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from treadle.conf.errors import ConfigError
from treadle.graph.source import Source
from treadle.runtime.request import RequestError, SamplingParams
from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, byte_characters
from treadle.runtime.text.vocabulary import tokenizer_from_gguf

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def load_tokenizer(source: Source, sampling: Mapping[str, Any] | None = None) -> Tokenizer:
    """Return the tokenizer of ``source``; random weights without files get ``byte_tokenizer``.

    ``sampling`` are the parameters of requests that do not give them (a resolved ``model.sampling``). Raises
    TokenizerError, naming the file or the key at fault, and ConfigError for values that no request may have.
    """
    tokenizer = _load(source)
    sampling = dict(sampling or {})
    check_sampling(sampling, tokenizer.vocab_size)
    tokenizer.facts = replace(tokenizer.facts, sampling=sampling)
    return tokenizer


def _load(source: Source) -> Tokenizer:
    if source.kind == "gguf":
        try:
            return tokenizer_from_gguf(source.metadata)
        except TokenizerError as error:
            raise TokenizerError(str(error), key="model.path", value=source.path) from error
    return byte_tokenizer() if source.path is None else tokenizer_from_directory(source.path)


def check_sampling(sampling: Mapping[str, Any], vocab: int) -> None:
    """Raise ConfigError for a value of a resolved ``model.sampling`` that no request may have."""
    try:
        SamplingParams(**{"max_tokens": None, **sampling}).typed().check(vocab)
    except RequestError as error:
        key = f"model.sampling.{error.field}" if error.field else "model.sampling"
        hint = "model.generation_config=none leaves out what the checkpoint recommends"
        raise ConfigError(str(error).removeprefix(f"{error.field}="), key=key, hint=hint) from None


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer for models that have none: ids 0 to 255 are bytes, nothing ends an answer."""
    core = tokenizers.Tokenizer(models.BPE({char: byte for byte, char in enumerate(byte_characters())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, TokenizerFacts(chat_templates={"default": PLAIN_TEMPLATE}))
