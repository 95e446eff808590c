"""A model of 24 letters behind the offline API: the real step loop over the history model."""

from __future__ import annotations

import string

import tokenizers
from history_model import VOCAB, Bench, answer
from tokenizers import decoders, models, pre_tokenizers

from treadle.runtime.llm import LLM
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerFacts

LETTERS = string.ascii_lowercase[:VOCAB]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"


def letters_llm(bench: Bench) -> LLM:
    """Return an LLM whose token i is the i-th letter."""
    core = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    facts = TokenizerFacts(
        chat_templates={"default": TEMPLATE}, template_tokens={"bos_token": "a"}, sampling={"temperature": 0.0}
    )
    return LLM.from_parts(bench.engine, Tokenizer(core, facts), Limits(max_len=64, vocab=VOCAB))


def text(ids: list[int]) -> str:
    """Return the letters of ``ids``."""
    return "".join(LETTERS[i] for i in ids)


def expected(prompt: str, count: int = 8) -> list[int]:
    """Return the tokens of a greedy answer."""
    return answer([LETTERS.index(letter) for letter in prompt], count)
