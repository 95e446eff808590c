"""The methods that scripts call on a tokenizer, beside transformers' own on the same vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tiny_text import tiny_tokenizer, write_directory

from treadle.runtime.request import RequestError
from treadle.runtime.text.hf_tokenizer import HFTokenizer

CHAT = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "jumps"}]


@pytest.fixture(scope="module")
def mine() -> HFTokenizer:
    return HFTokenizer(tiny_tokenizer().core, tiny_tokenizer().facts)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerFast:
    folder: Path = write_directory(tmp_path_factory.mktemp("tokenizer"), eos_token="<|im_end|>")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def test_texts_and_ids(mine: HFTokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    text = "the quick 龘 fox"
    ids = mine.encode(text)
    assert ids == theirs.encode(text)
    assert mine(text)["input_ids"] == theirs(text)["input_ids"]
    assert mine([text, "a"]) == dict(theirs([text, "a"], return_token_type_ids=False))
    ids = [1, *ids, 2]
    for skip in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False}):
        assert mine.decode(ids, **skip) == theirs.decode(ids, **skip)
        assert mine.batch_decode([ids, [5]], **skip) == theirs.batch_decode([ids, [5]], **skip)
    assert mine.decode(ids[1]) == theirs.decode(ids[1])


def test_names_of_tokens(mine: HFTokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    assert len(mine) == len(theirs)
    assert mine.get_vocab() == theirs.get_vocab()
    assert (mine.bos_token, mine.bos_token_id) == (theirs.bos_token, theirs.bos_token_id)
    assert (mine.eos_token, mine.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert mine.convert_ids_to_tokens([1, 5]) == theirs.convert_ids_to_tokens([1, 5])
    assert mine.convert_tokens_to_ids("<|im_end|>") == theirs.convert_tokens_to_ids("<|im_end|>") == 2
    assert mine.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, None]
    assert set(theirs.all_special_ids) <= set(mine.all_special_ids)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}])
def test_chat_templates(
    mine: HFTokenizer, theirs: transformers.PreTrainedTokenizerFast, options: dict[str, bool]
) -> None:
    text = mine.apply_chat_template(CHAT, tokenize=False, **options)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert mine.apply_chat_template(CHAT, **options) == mine.encode(text, add_special_tokens=False)
    both = mine.apply_chat_template([CHAT, CHAT[:1]], return_dict=True, **options)
    assert both["input_ids"][0] == mine.encode(text, add_special_tokens=False)
    assert [len(mask) for mask in both["attention_mask"]] == [len(ids) for ids in both["input_ids"]]
    assert mine.apply_chat_template(CHAT, chat_template="{{ x }}", x="the", tokenize=False) == "the"


def test_there_are_no_tensors(mine: HFTokenizer) -> None:
    with pytest.raises(RequestError, match="ids are lists here"):
        mine.apply_chat_template(CHAT, return_tensors="pt")
