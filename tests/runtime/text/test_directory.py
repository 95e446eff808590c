import json

import pytest
from tiny_text import TEMPLATE, tiny_tokenizer, write_directory

from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import TokenizerError


def write(path, value):
    path.write_text(json.dumps(value))


def test_reads_what_the_files_say(tmp_path):
    write_directory(tmp_path)
    write(
        tmp_path / "generation_config.json",
        {"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True},
    )
    tokenizer = tokenizer_from_directory(tmp_path)
    text = "the dogs 123 <|im_start|>"
    assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2, 0))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.facts.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.facts.sampling == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


def test_end_comes_from_config_json_without_a_generation_config(tmp_path):
    write_directory(tmp_path, eos_token=None)
    write(tmp_path / "config.json", {"eos_token_id": 0})
    assert tokenizer_from_directory(tmp_path).eos_ids == (0,)


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    write_directory(tmp_path)
    write(tmp_path / "tokenizer_config.json", {})
    write(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    assert tokenizer_from_directory(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(("explicit", "first"), [(True, 1), (False, None), (None, None)])
def test_bos_is_added_when_the_config_says_so(tmp_path, explicit, first):
    write_directory(tmp_path, **({} if explicit is None else {"add_bos_token": explicit}))
    plain = tiny_tokenizer().encode("the")
    assert tokenizer_from_directory(tmp_path).encode("the") == ([first, *plain] if first else plain)


def test_tokens_declared_in_the_config_alone_are_added(tmp_path):
    new = tiny_tokenizer().vocab_size
    declared = {str(new): {"content": "<think>", "special": False}, "1": {"content": "<|im_start|>", "special": True}}
    write_directory(tmp_path, added_tokens_decoder=declared)
    assert tokenizer_from_directory(tmp_path).encode("<think>") == [new]
    write_directory(tmp_path, added_tokens_decoder={"9999": {"content": "<think>"}})
    with pytest.raises(
        TokenizerError, match=f"tokenizer_config.json: declares token 9999 '<think>'.*gives it id {new}"
    ):
        tokenizer_from_directory(tmp_path)


def test_chat_templates_from_lists_and_files(tmp_path):
    entries = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_directory(tmp_path, chat_template=entries)
    assert tokenizer_from_directory(tmp_path).facts.chat_templates == {"default": "a", "tool_use": "b"}
    write(tmp_path / "chat_template.json", {"chat_template": "c"})
    assert tokenizer_from_directory(tmp_path).chat_template == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("e")
    found = tokenizer_from_directory(tmp_path).facts.chat_templates
    assert found == {"default": "d", "tool_use": "b", "rag": "e"}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"model\.path=.*: no tokenizer.json .*; it has tokenizer.model"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1}'])
def test_broken_files_are_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a tokenizer"):
        tokenizer_from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]" if content == "[]" else "{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: (not JSON|holds a list)"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("wrong", [-1, [2, -1], "</s>", 1.5])
def test_an_end_that_is_no_token_is_refused(tmp_path, wrong):
    write_directory(tmp_path)
    write(tmp_path / "generation_config.json", {"eos_token_id": wrong})
    with pytest.raises(TokenizerError, match=r"eos_token_id="):
        tokenizer_from_directory(tmp_path)
