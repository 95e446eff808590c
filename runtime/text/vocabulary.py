"""The tokenizer inside a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from treadle.runtime.text.pretokenizer import PRE_TOKENIZERS
from treadle.runtime.text.sentencepiece import CONTROL, NORMAL, SentencePieces
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, surround

CALLS = ("<|return|>", "<|call|>")
"""What ends an answer of GPT-OSS, whose <|end|> only ends one of its messages."""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<EOT>")
"""Control tokens that end an answer in every model that has them; many files name only one in eos_token_id."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's ``tokenizer.*`` metadata describe.

    Raises TokenizerError for a missing key, or a model or pre-tokenizer that is not known, naming those that are.
    """
    kind = _require(metadata, "tokenizer.ggml.model")
    pieces: list[str] = list(_require(metadata, "tokenizer.ggml.tokens"))
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)]
    if len(types) != len(pieces):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(pieces)} tokens")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    vocabulary = SentencePieces(pieces=pieces, scores=[], types=types)
    if kind == "gpt2":
        pre = str(metadata.get("tokenizer.ggml.pre", "default"))
        if pre not in PRE_TOKENIZERS:
            raise TokenizerError(f"tokenizer.ggml.pre={pre!r} is unknown; known: {', '.join(sorted(PRE_TOKENIZERS))}")
        core = byte_level(pieces, _require(metadata, "tokenizer.ggml.merges"), pre)
        add_bos = PRE_TOKENIZERS[pre].add_bos if add_bos is None else add_bos
    elif kind in ("llama", "t5"):
        vocabulary = replace(
            vocabulary,
            scores=[float(score) for score in _require(metadata, "tokenizer.ggml.scores")],
            add_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            join_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
            charsmap=bytes(value % 256 for value in metadata.get("tokenizer.ggml.precompiled_charsmap") or ()),
        )
        core = vocabulary.by_merges() if kind == "llama" else vocabulary.by_likelihood()
        add_bos = kind == "llama" if add_bos is None else add_bos
    else:
        known = "gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (SentencePiece unigram)"
        raise TokenizerError(f"tokenizer.ggml.model={kind!r} is unknown; known: {known}")
    vocabulary.add_tokens(core)
    facts = _facts(metadata, pieces, types)
    bos = [facts.bos_id] if add_bos and facts.bos_id is not None else []
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    surround(core, bos, [int(eos)] if metadata.get("tokenizer.ggml.add_eos_token") and eos is not None else [])
    return Tokenizer(core, facts)


def _require(metadata: Mapping[str, Any], key: str) -> Any:
    if metadata.get(key) is None:
        raise TokenizerError(f"the GGUF file has no {key}; it was written without its tokenizer")
    return metadata[key]


def byte_level(pieces: Sequence[str], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    """Return byte-level BPE that cuts as ``pre`` says; ``merges`` are pairs joined by one space."""
    cut = PRE_TOKENIZERS[pre]
    # A piece may itself hold a space only in its first character, so the separator is the first later one.
    pairs = []
    for merge in merges:
        at = merge.index(" ", 1)
        pairs.append((merge[:at], merge[at + 1 :]))
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=cut.whole_words))
    if cut.compose:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = cut.build()
    core.decoder = decoders.ByteLevel()
    return core


def _facts(metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> TokenizerFacts:
    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if value is not None and 0 <= int(value) < len(pieces) else None

    declared = [found for name in ("eos", "eot", "eom") if (found := token(name)) is not None]
    ends = {*END_OF_TURN, *CALLS} - ({"<|end|>"} if set(CALLS) <= set(pieces) else set())
    by_name = [i for i, piece in enumerate(pieces) if types[i] == CONTROL and piece in ends]
    named = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": str(value)
        for key, value in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    return TokenizerFacts(
        bos_id=token("bos"),
        eos_ids=tuple(dict.fromkeys([*declared, *by_name])),
        chat_templates=templates,
        template_tokens={name: pieces[i] for name, i in named.items() if i is not None},
    )
