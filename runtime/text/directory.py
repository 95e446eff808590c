"""The tokenizer of a Hugging Face-layout directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, surround

TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def tokenizer_from_directory(directory: str | Path) -> Tokenizer:
    """Return the tokenizer that ``directory`` holds: tokenizer.json and what the files beside it say.

    Raises TokenizerError if tokenizer.json is missing or a file is unreadable, naming the file.
    """
    directory = Path(directory)
    core = _read_core(directory / "tokenizer.json")
    config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    generation = _read_json(directory / "generation_config.json")
    model = generation if "eos_token_id" in generation else _read_json(directory / "config.json")
    _add_declared_tokens(core, config.get("added_tokens_decoder") or {}, directory / "tokenizer_config.json")

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
        sampling={name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None},
    )
    return Tokenizer(core, facts)


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (path.parent / name).is_file()]
        hint = f"it has {', '.join(others)}, which must be converted to tokenizer.json once" if others else ""
        problem = "no tokenizer.json in the model directory"
        raise TokenizerError(problem, key="model.path", value=path.parent, hint=hint)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any malformed file
        problem = f"not a tokenizer that this version of tokenizers reads: {error}"
        raise TokenizerError(problem, key=str(path)) from error


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
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks."""
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if core.token_to_id(token["content"]) is not None:
            continue
        flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
        core.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
        if core.token_to_id(token["content"]) != int(token_id):
            raise TokenizerError(
                f"declares token {token_id} {token['content']!r}, but the vocabulary of tokenizer.json "
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
