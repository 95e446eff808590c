"""The tokenizer as scripts know it that were written for transformers: its methods, names and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from treadle.runtime.request import RequestError
from treadle.runtime.text.template import ChatTemplate, chat_template
from treadle.runtime.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]


class HFTokenizer(Tokenizer):
    """What ``LLM.get_tokenizer`` returns. Ids are lists; there are no tensors."""

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask`` of one text, or of each."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        many = [self.encode(each, add_special_tokens) for each in text]
        return {"input_ids": many, "attention_mask": [[1] * len(ids) for ids in many]}

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""
        return self.vocab_size

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one id or of many, special tokens too unless they are to be skipped."""
        return super().decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        return_tensors: None = None,
        **variables: Any,
    ) -> Any:
        """Return the prompt of a conversation, or of each of many: ids, or text without ``tokenize``.

        Raises: RequestError for messages that the template refuses, and for tensors.
        """
        if return_tensors is not None:
            raise RequestError(f"return_tensors={return_tensors!r}: ids are lists here; leave it out", "return_tensors")
        if conversation and not isinstance(conversation[0], Mapping):
            made = [
                self.apply_chat_template(
                    cast("Conversation", each), tools, chat_template, add_generation_prompt, continue_final_message,
                    tokenize, **variables,
                )
                for each in conversation
            ]  # fmt: skip
            masks = [[1] * len(ids) for ids in made]
            return {"input_ids": made, "attention_mask": masks} if return_dict and tokenize else made
        text = self._template(chat_template).render(
            cast("Conversation", conversation),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=variables,
        )
        if not tokenize:
            return text
        return self(text, add_special_tokens=False) if return_dict else self.encode(text, add_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token by its spelling in the vocabulary, or of each; None where there is none."""
        return self.token_id(tokens) if isinstance(tokens, str) else [self.token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the spelling of an id in the vocabulary, or of each."""
        return self.core.id_to_token(ids) if isinstance(ids, int) else [self.core.id_to_token(each) for each in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their spelling."""
        vocab: dict[str, int] = self.core.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def eos_token_id(self) -> int | None:
        """The first token that ends an answer."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self.bos_id

    @property
    def eos_token(self) -> str | None:
        """The spelling of ``eos_token_id``."""
        return None if self.eos_token_id is None else str(self.convert_ids_to_tokens(self.eos_token_id))

    @property
    def bos_token(self) -> str | None:
        """The spelling of ``bos_token_id``."""
        return None if self.bos_id is None else str(self.convert_ids_to_tokens(self.bos_id))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of special tokens."""
        return sorted(self.special_ids)

    def _template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source, self.facts.template_tokens)
        return chat_template(self.facts.chat_templates, self.facts.template_tokens)
