"""The tokenizer that belongs to a checkpoint, whatever its form."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from treadle.graph.source import Source
from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, byte_characters
from treadle.runtime.text.vocabulary import tokenizer_from_gguf

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def load_tokenizer(source: Source) -> Tokenizer:
    """Return the tokenizer of ``source``; random weights without files get ``byte_tokenizer``.

    Raises TokenizerError, naming the file or the key at fault.
    """
    if source.kind == "gguf":
        try:
            return tokenizer_from_gguf(source.metadata)
        except TokenizerError as error:
            raise TokenizerError(str(error), key="model.path", value=source.path) from error
    return byte_tokenizer() if source.path is None else tokenizer_from_directory(source.path)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer for models that have none: ids 0 to 255 are bytes, nothing ends an answer."""
    core = tokenizers.Tokenizer(models.BPE({char: byte for byte, char in enumerate(byte_characters())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, TokenizerFacts(chat_templates={"default": PLAIN_TEMPLATE}))
