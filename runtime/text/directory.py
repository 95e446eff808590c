"""The tokenizer of a Hugging Face-layout directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from treadle.runtime.text.sentencepiece_model import sentence_pieces
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, surround
from treadle.runtime.text.vocabulary import byte_level

CUTS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "CodeGenTokenizer": "gpt-2"}
"""tokenizer classes whose vocab.json and merges.txt suffice -> the names of their cuts in GGUF files"""
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_directory(directory: str | Path) -> Tokenizer:
    """Return the tokenizer that ``directory`` holds: its vocabulary and what the files beside it say.

    The vocabulary is tokenizer.json, or else tokenizer.model (SentencePiece), or vocab.json and merges.txt. Raises
    TokenizerError if there is none or a file is unreadable, naming the file.
    """
    directory = Path(directory)
    config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    core = _read_core(directory, config)
    generation = _read_json(directory / "generation_config.json")
    model = generation if "eos_token_id" in generation else _read_json(directory / "config.json")
    _add_declared_tokens(core, _declared(directory, config), directory / "tokenizer_config.json")

    named = {name: _content(config[name]) for name in TEMPLATE_TOKENS if config.get(name)}
    bos_of_text, eos_of_text = (
        _ids(core.token_to_id(named[name]) if name in named else None, name) for name in ("bos_token", "eos_token")
    )
    bos_ids = bos_of_text if "bos_token" in named else _ids(model.get("bos_token_id"), "bos_token_id")
    eos_ids = _ids(model.get("eos_token_id"), "eos_token_id") + eos_of_text
    if "add_bos_token" in config or "add_eos_token" in config:
        before = bos_ids[:1] if config.get("add_bos_token") else []
        surround(core, before, eos_of_text if config.get("add_eos_token") else [])
    facts = TokenizerFacts(
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        chat_templates=_chat_templates(directory, config.get("chat_template")),
        template_tokens=named,
    )
    return Tokenizer(core, facts)


def _read_core(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the vocabulary; ``config`` gains what a form without a post-processor of its own stands for."""
    path, pieces = directory / "tokenizer.json", directory / "tokenizer.model"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any malformed file
            problem = f"not a tokenizer that this version of tokenizers reads: {error}"
            raise TokenizerError(problem, key=str(path)) from error
    if pieces.is_file():
        core, vocabulary = sentence_pieces(pieces, legacy=config.get("legacy") is not False)
        for name, usual in (("bos_token", "<s>"), ("eos_token", "</s>")):
            if name not in config and usual in vocabulary.pieces:
                config[name] = usual
        config.setdefault("add_bos_token", "bos_token" in config)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        core = _read_merges(directory, str(config.get("tokenizer_class", "")))
    else:
        raise _nothing(directory)
    special = [_content(config[name]) for name in TEMPLATE_TOKENS if config.get(name)]
    core.add_special_tokens([AddedToken(t, normalized=False) for t in special if core.token_to_id(t) is not None])
    return core


def _nothing(directory: Path) -> TokenizerError:
    hint = "it has tekken.json, which must be converted to tokenizer.json once"
    problem = "no tokenizer.json, tokenizer.model, or vocab.json and merges.txt in the model directory"
    found = (directory / "tekken.json").is_file()
    return TokenizerError(problem, key="model.path", value=directory, hint=hint if found else "")


def _read_merges(directory: Path, kind: str) -> tokenizers.Tokenizer:
    """Return byte-level BPE from its two files; how it cuts text, only its class says."""
    pre = CUTS.get(kind.removesuffix("Fast"))
    if pre is None:
        raise TokenizerError(
            "how this class cuts text is not known, and there is no tokenizer.json that says it",
            key=str(directory / "tokenizer_config.json"),
            value=f"tokenizer_class {kind}",
            hint=f"classes that can be read without it: {', '.join(CUTS)}",
        )
    vocabulary, path = _read_json(directory / "vocab.json"), directory / "merges.txt"
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[piece] for piece in pieces] != list(range(len(pieces))):
        raise TokenizerError("ids are not 0, 1, 2, ...", key=str(directory / "vocab.json"))
    lines = path.read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    try:
        return byte_level(pieces, merges, pre)
    except Exception as error:  # bare from the library: a merge of pieces that the vocabulary lacks
        raise TokenizerError(f"does not fit vocab.json: {error}", key=str(path)) from error


def _declared(directory: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tokens that files beside the vocabulary declare, by their id."""
    added = _read_json(directory / "added_tokens.json")
    return {str(i): {"content": token} for token, i in added.items()} | (config.get("added_tokens_decoder") or {})


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"not JSON: {error}", key=str(path)) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"holds a {type(value).__name__}, not an object", key=str(path))
    return value


def _content(token: str | dict[str, Any]) -> str:
    """Return the text of a token written as a string or as an AddedToken object."""
    return token if isinstance(token, str) else str(token["content"])


def _ids(value: object, key: str) -> list[int]:
    found: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in found:
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError("neither a token id nor a list of them", key=key, value=value)
    return found


def _add_declared_tokens(core: tokenizers.Tokenizer, declared: dict[str, dict[str, Any]], path: Path) -> None:
    """Add the tokens that are declared and that the vocabulary does not read as they are written yet."""
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] in known:
            continue
        flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
        core.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
        if core.token_to_id(token["content"]) != int(token_id):
            raise TokenizerError(
                f"declares token {token_id} {token['content']!r}, but the vocabulary "
                f"gives it id {core.token_to_id(token['content'])}",
                key=str(path),
            )


def _chat_templates(directory: Path, configured: str | list[dict[str, str]] | None) -> dict[str, str]:
    """Return chat templates by name; files of their own win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif configured:
        templates.update((entry["name"], entry["template"]) for entry in configured)
    old = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(old, str):
        templates["default"] = old
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    own = directory / "chat_template.jinja"
    if own.is_file():
        templates["default"] = own.read_text(encoding="utf-8")
    return templates
