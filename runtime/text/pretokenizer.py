"""How byte-level BPE families cut text before merging, by the name that a GGUF file gives in ``tokenizer.ggml.pre``.

Source: the pre-tokenizers of the models' own tokenizer.json files; llama.cpp names them in llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """A cut: ``pattern`` isolates words; with ``split_digits`` every digit is isolated before it."""

    pattern: str
    split_digits: bool = False
    whole_words: bool = False
    """a word that is itself a token is taken whole, whatever the merges say"""
    compose: bool = False
    """Unicode NFC first; llama.cpp leaves it out, the models were trained with it"""
    add_bos: bool = False
    """what ``add_bos_token`` means when the file leaves it out"""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the cut followed by the map from bytes to printable characters."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.split_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated", invert=False))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer(pattern=GPT2)
_DIGITS_GPT2 = PreTokenizer(pattern=GPT2, split_digits=True)
_QWEN2 = PreTokenizer(pattern=QWEN2)
_LLAMA3 = PreTokenizer(pattern=LLAMA3, whole_words=True, add_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "qwen2": PreTokenizer(pattern=QWEN2, compose=True),
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "megrez": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": PreTokenizer(pattern=LLAMA3),
    "glm4": PreTokenizer(pattern=LLAMA3),
    "chatglm-bpe": PreTokenizer(pattern=LLAMA3),
    "gpt-4o": PreTokenizer(pattern=GPT4O),
    "llama4": PreTokenizer(pattern=GPT4O),
    "tekken": PreTokenizer(pattern=TEKKEN, whole_words=True),
}
