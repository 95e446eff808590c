"""The tokenizer that belongs to a checkpoint, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from treadle.conf.errors import ConfigError, nearest
from treadle.graph.generation import RECOMMENDED
from treadle.graph.source import Source
from treadle.runtime.request import RequestError, SamplingParams
from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, byte_characters
from treadle.runtime.text.vocabulary import tokenizer_from_gguf

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def load_tokenizer(source: Source, sampling: Mapping[str, Any] | None = None) -> Tokenizer:
    """Return the tokenizer of ``source``; random weights without files get ``byte_tokenizer``.

    ``sampling`` are the parameters of requests that do not give them (a resolved ``model.sampling``). Raises
    TokenizerError, naming the file or the key at fault, and ConfigError for sampling parameters that are none.
    """
    tokenizer = _load(source)
    tokenizer.facts = replace(tokenizer.facts, sampling=_supported(sampling or {}, tokenizer.vocab_size))
    return tokenizer


def _load(source: Source) -> Tokenizer:
    if source.kind == "gguf":
        try:
            return tokenizer_from_gguf(source.metadata)
        except TokenizerError as error:
            raise TokenizerError(str(error), key="model.path", value=source.path) from error
    return byte_tokenizer() if source.path is None else tokenizer_from_directory(source.path)


def _supported(sampling: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Return the parameters that requests have. Raises ConfigError for a name or a value that none may have."""
    known = tuple(RECOMMENDED.values())
    for name, value in sampling.items():
        if name not in known:
            close = [f"model.sampling.{other}" for other in nearest(name, known)]
            hint = f"those with a default: {', '.join(known)}"
            raise ConfigError("no such default", key=f"model.sampling.{name}", value=value, nearest=close, hint=hint)
    found = {name: value for name, value in sampling.items() if name in SamplingParams.__struct_fields__}
    try:
        SamplingParams(**{"max_tokens": None, **found}).typed().check(vocab)
    except RequestError as error:
        key = "model.sampling" if error.field is None else f"model.sampling.{error.field}"
        raise ConfigError(str(error), key=key, hint="model.generation_config=none takes no defaults") from None
    return found


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer for models that have none: ids 0 to 255 are bytes, nothing ends an answer."""
    core = tokenizers.Tokenizer(models.BPE({char: byte for byte, char in enumerate(byte_characters())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, TokenizerFacts(chat_templates={"default": PLAIN_TEMPLATE}))
